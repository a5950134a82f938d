"""The container and cluster files call programs and flags that exist, and treat exit code 75 as the pages say."""

import re
from pathlib import Path

import yaml

from utils.config import arguments

ROOT = Path(__file__).resolve().parents[2]
STOPPED, MISTAKE = 75, 2


def test_the_train_job_resumes_after_75_and_ends_at_a_users_mistake():
    runtime, job = yaml.safe_load_all((ROOT / "scripts/trainjob.yaml").read_text())
    spec = runtime["spec"]["template"]["spec"]
    (node,) = spec["replicatedJobs"]
    policy = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert [(rule["action"], rule["onExitCodes"]["values"]) for rule in policy] == [("FailJob", [MISTAKE])]
    (rule,) = spec["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]), "JobSet refuses other names"
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "which podFailurePolicy asks for"
    names = {policy[0]["onExitCodes"]["containerName"]}
    assert names == {container["name"] for container in pod["containers"]}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    program, *flags = job["spec"]["trainer"]["args"]
    assert (ROOT / program).is_file() and (ROOT / job["spec"]["trainer"]["command"][1]).is_file()
    args = arguments.parse(flags)
    assert args.run.resume == "auto" and args.values()["save_every_steps"] == 500


def test_the_rented_job_resumes_after_75_alone():
    task = yaml.safe_load((ROOT / "scripts/skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [STOPPED]}
    (line,) = [line for line in task["run"].splitlines() if "launch.sh" in line]
    _, script, recipe, data, *flags = line.split()
    assert (ROOT / script).is_file() and {data, "/workspace/runs"} == task["file_mounts"].keys()
    args = arguments.parse(["--config", recipe, "--datapath", data, *flags])
    assert (args.run.resume, args.run.output) == ("auto", "/workspace/runs")


def test_the_image_starts_the_launcher_as_process_1_and_gets_its_signal():
    words = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["bash", "scripts/launch.sh"]' in words and "STOPSIGNAL SIGTERM" in words
    assert "docker stop -t 120" in words, "whose long form is --time before Docker 28 and --timeout from it on"
    assert "exec " in (ROOT / "scripts/launch.sh").read_text(), "so that the signal reaches Python"
