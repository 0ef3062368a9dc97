//! The places where people run programs: a Jupyter notebook, the steps of the GitHub action, a
//! container's seccomp profile, a Kubernetes deployment. The place itself is not there, so the
//! tests run the parts that work without it, by Python programs whose modules come from PyPI.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use uzswap_tests::{is_full, program};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// An environment with three parts: programs from PyPI, which are installed once, the Python half
/// of the module from these sources, and the built program. Only one test at a time may change it.
fn environment(packages: &[&str]) -> PathBuf {
    static CHANGE: Mutex<()> = Mutex::new(());
    let _one = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let target = program("uzswap").ancestors().nth(2).unwrap().to_owned();
    let environment = target.join("places");
    let python = environment.join("bin/python");
    // pip is installed last, so an environment that was interrupted has none.
    if !environment.join("bin/pip").exists() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&environment));
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    succeed(Command::new(&python).args(pip).args(packages));
    environment
}

/// A command that finds the built programs first in its PATH, and the module.
fn with_program(command: &str, environment: &Path) -> Command {
    let built = program("uzswap").parent().unwrap().to_owned();
    let mut command = Command::new(command);
    let path = std::env::var("PATH").unwrap();
    let path = format!("{}:{}:{path}", environment.join("bin").display(), built.display());
    command.env("PATH", path).env("PYTHONPATH", sources().join("python"));
    command
}

/// A notebook that keeps 260 MB, calls the line magic, and reads all of this memory.
const NOTEBOOK: &str = r#"
import nbformat, nbclient, sys
cells = ["pages = [bytes([i % 251]) * 600 + str(i).encode() for i in range(400000)]",
         "%load_ext uzswap.kernelspec", "%uzswap",
         "import hashlib\nsums = hashlib.md5()\nfor page in pages: sums.update(page)\nprint(sums.hexdigest())"]
book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
nbclient.NotebookClient(book, kernel_name=sys.argv[1], timeout=900, startup_timeout=300).execute()
for cell in book.cells:
    for output in cell.outputs: print(output.get("text", output), end="")
"#;

#[test]
fn a_notebook_has_twice_the_memory_of_its_kernel() {
    if !is_full() {
        println!("skipped: UZSWAP_FULL=1 installs Jupyter and runs it");
        return;
    }
    let environment = environment(&["ipykernel", "nbclient", "nbformat"]);
    let folder = tempfile::tempdir().unwrap();
    let python = environment.join("bin/python").display().to_string();
    let run = |arguments: &[&str]| {
        let mut command = with_program(&python, &environment);
        succeed(command.env("HOME", folder.path()).current_dir(folder.path()).args(arguments))
    };
    // The native half is not needed here, but the package would load it.
    let module = folder.path().join("uzswap");
    fs::create_dir(&module).unwrap();
    for name in ["__main__.py", "kernelspec.py"] {
        fs::copy(sources().join("python/uzswap").join(name), module.join(name)).unwrap();
    }
    fs::write(module.join("__init__.py"), "").unwrap();
    let run_here = |arguments: &[&str]| {
        let mut command = with_program(&python, &environment);
        let command = command.env("HOME", folder.path()).env("PYTHONPATH", folder.path());
        succeed(command.current_dir("/").args(arguments))
    };
    let install = ["-m", "uzswap.kernelspec", "install", "--user", "--memory", "128M"];
    let place = text(&run_here(&install));
    let specification = fs::read_to_string(Path::new(place.trim()).join("kernel.json")).unwrap();
    assert!(specification.contains("Python 3 (uzswap, 128M)"), "{specification}");
    let printed = text(&run_here(&["-c", NOTEBOOK, "uzswap"]));
    let figures = printed.lines().find(|line| line.starts_with("uzswap: ")).expect("the magic");
    assert!(figures.contains("compressed to"), "{printed}");
    let expected = run(&[
        "-I",
        "-c",
        "import hashlib
sums = hashlib.md5()
for i in range(400000): sums.update(bytes([i % 251]) * 600 + str(i).encode())
print(sums.hexdigest())",
    ]);
    assert_eq!(printed.lines().last(), text(&expected).lines().last(), "{printed}");
    println!("{figures}");
}

/// Runs the steps of a composite action by `bash`, with these inputs, and the defaults of all other
/// inputs. No wheel is needed: pip is a program that does nothing.
const STEPS: &str = r#"
import os, re, subprocess, sys, yaml
action = yaml.safe_load(open(sys.argv[1]))
given = dict(pair.split("=", 1) for pair in sys.argv[2:])
inputs = {name: given.get(name, value.get("default", "")) for name, value in action["inputs"].items()}
assert all(name in inputs for name in given), "an input that the action has not"
fill = lambda text: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda name: inputs[name[1]], text)
for step in action["runs"]["steps"]:
    assert step["shell"] == "bash"
    variables = {name: fill(value) for name, value in step.get("env", {}).items()}
    ended = subprocess.run(["bash", "-eo", "pipefail", "-c", fill(step["run"])], env={**os.environ, **variables})
    if ended.returncode: sys.exit(ended.returncode)
"#;

#[test]
fn the_steps_of_the_action_run_commands_and_leave_a_notice() {
    let environment = environment(&["pyyaml"]);
    let folder = tempfile::tempdir().unwrap();
    // The folder into which the first step would install. The folder has the programs already.
    let bin = folder.path().join("uzswap/bin");
    fs::create_dir_all(&bin).unwrap();
    std::os::unix::fs::symlink(program("uzswap"), bin.join("uzswap")).unwrap();
    let steps = |inputs: &[&str]| {
        let python = environment.join("bin/python").display().to_string();
        let mut command = with_program(&python, &environment);
        command.env("RUNNER_TEMP", folder.path());
        command.env("GITHUB_OUTPUT", folder.path().join("output"));
        // A venv would hide the program. Here `python3 -m venv` and pip do nothing.
        let stub = folder.path().join("stub");
        fs::create_dir_all(&stub).unwrap();
        let real = environment.join("bin/python3").display().to_string();
        let python3 = format!("#!/bin/sh\n[ \"$1\" = -m ] || exec {real} \"$@\"\n");
        for (name, script) in
            [(stub.join("python3"), python3), (bin.join("pip"), "#!/bin/sh\n".into())]
        {
            fs::write(&name, script).unwrap();
            succeed(Command::new("chmod").arg("+x").arg(&name));
        }
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", stub.display()));
        command.args(["-c", STEPS]).arg(sources().join("action.yml")).args(inputs);
        command.output().unwrap()
    };
    let command = "run=x=$(printf 'a\\nb')\ntest \"$x\" = \"$(printf 'a\\nb')\"\necho \"it's $x\"";
    let output = steps(&[command, "memory=256M"]);
    let (printed, said) = (text(&output), String::from_utf8_lossy(&output.stderr).into_owned());
    assert!(output.status.success(), "{printed}\n{said}");
    assert!(printed.contains("it's a\nb\n"), "{printed}");
    assert!(printed.contains("::notice title=uzswap::"), "{printed}\n{said}");
    assert!(printed.contains("of 256 MiB in memory"), "{printed}");
    let report = fs::read_to_string(folder.path().join("output")).unwrap();
    assert!(report.starts_with("report=/"), "{report}");
    // The first failing command ends the step with its status.
    let output = steps(&["run=false | true\necho not reached", "memory=256M"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(!text(&output).contains("not reached"));
}

#[test]
fn a_seccomp_profile_gets_one_more_call_and_keeps_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("default.json");
    let conditional = r#"{"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
        {"names": ["ustat", "userfaultfd"], "action": "SCMP_ACT_ERRNO"},
        {"names": ["userfaultfd"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_PTRACE"]}}]}"#;
    fs::write(&profile, conditional).unwrap();
    let run = |path: &Path| {
        let script = sources().join("packaging/docker/seccomp.py");
        Command::new("python3").arg(script).arg(path).output().unwrap()
    };
    let first = text(&run(&profile));
    let changed: serde_json::Value = serde_json::from_str(&first).unwrap();
    let rules = changed["syscalls"].as_array().unwrap();
    assert_eq!(rules.len(), 4);
    assert_eq!(rules[3]["names"][0], "userfaultfd");
    assert_eq!(rules[3].as_object().unwrap().len(), 2, "for everybody: {first}");
    assert_eq!(rules[0]["names"][1], "write");
    // Podman's profile denies a call by name in the same way.
    assert_eq!(rules[1]["names"], serde_json::json!(["ustat"]));
    // A second run changes nothing.
    fs::write(&profile, &first).unwrap();
    assert_eq!(text(&run(&profile)), first);
    for wrong in ["{}", "[]", "no JSON"] {
        fs::write(&profile, wrong).unwrap();
        let output = run(&profile);
        assert_eq!(output.status.code(), Some(1), "{wrong}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1, "{wrong}");
    }
}

/// Checks that each mounted volume is declared.
const DEPLOYMENT: &str = r#"
import sys, yaml
pod = yaml.safe_load(open(sys.argv[1]))["spec"]["template"]["spec"]
volumes = {volume["name"] for volume in pod["volumes"]}
containers = pod["initContainers"] + pod["containers"]
mounts = {mount["name"] for container in containers for mount in container["volumeMounts"]}
assert mounts == volumes, (mounts, volumes)
component = yaml.safe_load(open(sys.argv[2]))
assert component["kind"] == "Component" and component["patches"][0]["path"] == "pod.yaml"
print(pod["containers"][0]["env"][0]["value"])
"#;

#[test]
fn the_kubernetes_component_names_only_objects_that_it_declares() {
    let environment = environment(&["pyyaml"]);
    let folder = sources().join("packaging/kubernetes");
    let mut python = Command::new(environment.join("bin/python"));
    python.args(["-c", DEPLOYMENT]).arg(folder.join("pod.yaml"));
    let budget = text(&succeed(python.arg(folder.join("kustomization.yaml"))));
    assert_eq!(budget.trim(), "896M", "7/8 of 1Gi, as docs/containers.md says");
}
