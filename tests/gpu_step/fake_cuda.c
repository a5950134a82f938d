// A CUDA runtime and driver that do nothing, for fake tensors on a machine without a GPU. Nothing computes on a fake
// tensor, so it is enough that each call says that it went well and gives a handle, a device or a size where one is
// asked for. Preloaded, it stands in for libcudart and, under another name, for libcuda.
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

static unsigned long handles = 16;
static int device = 0;
#define GIVES_A_HANDLE(name, ...) int name(void **handle, ##__VA_ARGS__) { *handle = (void *)(handles += 16); return 0; }
#define GIVES(name, value, type, ...) int name(type *given, ##__VA_ARGS__) { *given = value; return 0; }
#define DOES_NOTHING(name) int name(void) { return 0; }

GIVES(cudaGetDeviceCount, 1, int)
GIVES(cudaGetDevice, device, int)
GIVES(cudaDriverGetVersion, 13000, int)
GIVES(cudaRuntimeGetVersion, 13000, int)
GIVES(cudaDeviceCanAccessPeer, 1, int, int a, int b)
GIVES(cudaDeviceGetAttribute, attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : 1, int, int attribute, int of)
GIVES(cudaDeviceGetDefaultMemPool, (void *)16, void *, int of)
GIVES_A_HANDLE(cudaStreamCreateWithPriority, unsigned flags, int priority)
GIVES_A_HANDLE(cudaStreamCreateWithFlags, unsigned flags)
GIVES_A_HANDLE(cudaEventCreateWithFlags, unsigned flags)
int cudaSetDevice(int to) { device = to; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -1; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status, void *a, void *b, void *c, void *d, void *e) { *status = 0; return 0; }
int cudaEventElapsedTime(float *milliseconds, void *from, void *to) { *milliseconds = 1; return 0; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = 80ull << 30; return 0; }
int cudaHostAlloc(void **memory, size_t size, unsigned flags) { *memory = malloc(size); return 0; }
int cudaMallocHost(void **memory, size_t size) { *memory = malloc(size); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaMalloc(void **memory, size_t size) { *memory = malloc(size); return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status);
int cudaGetDeviceProperties(struct cudaDeviceProp *of, int number) {
    memset(of, 0, sizeof *of);
    strcpy(of->name, "no GPU (pretended)");
    of->major = 9;
    of->multiProcessorCount = 132;
    of->totalGlobalMem = 80ull << 30;
    of->warpSize = 32;
    of->maxThreadsPerBlock = 1024;
    of->maxThreadsPerMultiProcessor = 2048;
    of->sharedMemPerBlock = 49152;
    of->sharedMemPerMultiprocessor = 233472;
    of->regsPerMultiprocessor = 65536;
    of->l2CacheSize = 50 << 20;
    of->maxGridSize[0] = 2147483647;
    return 0;
}
const char *cudaGetErrorString(int error) { return "pretended"; }
const char *cudaGetErrorName(int error) { return "pretended"; }
static int nothing(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
    *function = (void *)nothing;
    if (status) *status = 0;
    return 0;
}
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaEventDestroy)
DOES_NOTHING(cudaEventQuery)
DOES_NOTHING(cudaEventRecord)
DOES_NOTHING(cudaEventRecordWithFlags)
DOES_NOTHING(cudaEventSynchronize)
DOES_NOTHING(cudaFree)
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaHostRegister)
DOES_NOTHING(cudaHostUnregister)
DOES_NOTHING(cudaMemcpyAsync)
DOES_NOTHING(cudaMemsetAsync)
DOES_NOTHING(cudaPeekAtLastError)
DOES_NOTHING(cudaStreamQuery)
DOES_NOTHING(cudaStreamSynchronize)
DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaThreadExchangeStreamCaptureMode)
int cudaDeviceGetPCIBusId(char *bus, int length, int of) { strncpy(bus, "0000:00:00.0", length); return 0; }
GIVES(cuDeviceGet, number, int, int number)
GIVES_A_HANDLE(cuCtxGetCurrent)
DOES_NOTHING(cuCtxSetCurrent)
DOES_NOTHING(cuInit)
int cuDevicePrimaryCtxGetState(int of, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "pretended"; return 0; }
