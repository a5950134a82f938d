import sys, time, torch, timm
bench = sys.argv[1] == "1"
torch.backends.cudnn.benchmark = bench
torch.zeros(1).cuda()
for name, batch, size, dtype in (("resnet50", 128, 224, torch.bfloat16), ("resnet50", 256, 224, torch.float16), ("convnext_tiny", 128, 224, torch.bfloat16), ("efficientnet_b0", 128, 224, torch.float16), ("resnet18", 512, 32, torch.float16)):
    model = timm.create_model(name, num_classes=10).cuda().to(memory_format=torch.channels_last).eval()
    x = torch.randn(batch, 3, size, size, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.inference_mode(), torch.autocast("cuda", dtype):
        torch.cuda.synchronize(); t = time.perf_counter(); model(x); torch.cuda.synchronize(); first = time.perf_counter() - t
        for _ in range(5): model(x)
        torch.cuda.synchronize(); t = time.perf_counter()
        for _ in range(20): model(x)
        torch.cuda.synchronize(); each = (time.perf_counter() - t) / 20
    print(f"BN {name} {batch} {size} {dtype} benchmark {bench} first {first:.3f} s, each {1000*each:.3f} ms", flush=True)
