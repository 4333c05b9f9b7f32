#!/usr/bin/env python3
"""Checks the workflow that builds a release, and runs those of its steps that no other test runs.

    workflow.py DIST FOLDER     DIST has what `make dist` wrote; FOLDER is a new folder for files of the test

The step that compares the tag with the version is run with the right tag and with another one. The step that writes the draft is
run with a `gh` that only notes its arguments. At last the workflow is broken in several ways, each of which has to be noticed.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORKFLOW = ROOT / ".github/workflows/release.yml"
# What the runner sets, and the steps use.
REPOSITORY = "example/seikan"
# Options of `gh release create` that the draft may use; `--repo` has a value.
OPTIONS = {"--repo", "--draft", "--verify-tag", "--generate-notes"}
# What has to run before anything is attached.
NEEDED = ["dist", "dist-check", "openwrt-check"]

# Each replacement is one mistake.
MISTAKES = [
    ("make dist-check", "make dist-chek"),
    ("make openwrt-check", "true"),
    ("run: make dist\n", "run: make release\n"),
    ('test "v$(', 'test "$('),
    ('= "$GITHUB_REF_NAME"', '!= ""'),
    ("--draft ", ""),
    ("packages/*", "packages/*.deb"),
    ("packages/*", "target/dist/*"),
    ('--repo "$GITHUB_REPOSITORY"', ""),
    ("path: target/dist/", "path: target/"),
    ("    needs: build\n", ""),
    ("contents: read", "contents: write"),
    ("permissions: {}", "permissions: write-all"),
    ('"v[0-9]+.[0-9]+.[0-9]+"', '"v*"'),
    ('create "$GITHUB_REF_NAME"', 'create "${{ github.ref_name }}"'),
    ("GH_TOKEN:", "TOKEN:"),
]


def targets():
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def made(script):
    """Targets that a step makes."""
    words = shlex.split(script, comments=True)
    for index, word in enumerate(words):
        if word == "make":
            for name in words[index + 1 :]:
                if not re.fullmatch(r"[a-z-]+", name):
                    break
                yield name


def run(step, folder, **variables):
    """Runs a step as the runner does; `None` if it succeeded, else what it printed."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "CARGO_HOME", "RUSTUP_HOME") if name in os.environ}
    environment |= {name: "of the runner" for name in step.get("env", {})} | variables
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return None if ended.returncode == 0 else ended.stderr + ended.stdout + f"status {ended.returncode}"


def tag_faults(text, version):
    """Tags that start the workflow and should not, or the reverse."""
    patterns = [re.escape(pattern).replace(r"\[0\-9\]\+", "[0-9]+").replace(r"\*", ".*") for pattern in text]
    for tag, is_release in ((f"v{version}", True), (f"v{version}-rc.1", False), ("next", False)):
        if any(re.fullmatch(pattern, tag) for pattern in patterns) != is_release:
            yield f"the tag {tag} {'does not start' if is_release else 'starts'} the workflow"


def version_faults(steps, version):
    """Faults of the step that compares the tag with the version; it comes first."""
    [step] = [step for step in steps if "cargo metadata" in step.get("run", "")] or [None]
    if step is None:
        return ["no step compares the tag with the version"]
    if any(list(made(other.get("run", ""))) for other in steps[: steps.index(step)]):
        return ["the tag is compared late"]
    faults = []
    if problem := run(step, ROOT, GITHUB_REF_NAME=f"v{version}"):
        faults.append(f"the tag v{version} is refused: {problem}")
    if run(step, ROOT, GITHUB_REF_NAME="v999.0.0") is None:
        faults.append("the tag v999.0.0 is accepted")
    return faults


def draft_faults(job, version, dist, folder):
    """Faults of the job that writes the draft."""
    steps = job["steps"]
    download = next((step for step in steps if "download-artifact" in step.get("uses", "")), {"with": {}})
    step = steps[-1]
    if "GH_TOKEN" not in step.get("env", {}):
        return ["gh has no token"]
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    packages = folder / download["with"].get("path", ".")
    packages.mkdir(parents=True, exist_ok=True)
    expected = sorted(path.name for path in dist.iterdir())
    for name in expected:
        (packages / name).symlink_to(dist / name)
    gh = folder / "bin/gh"
    gh.write_text('#!/usr/bin/env python3\nimport json, sys\njson.dump(sys.argv[1:], open("arguments", "w"))\n')
    gh.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    problem = run(step, folder, PATH=path, GITHUB_REF_NAME=f"v{version}", GITHUB_REPOSITORY=REPOSITORY)
    if problem or not (folder / "arguments").exists():
        return [f"the draft fails: {problem or 'gh is not called'}"]
    arguments = json.loads((folder / "arguments").read_text())
    faults = [f"gh has no option {word}" for word in arguments if word.startswith("-") and word not in OPTIONS]
    faults += [f"the draft lacks {option}" for option in sorted(OPTIONS) if option not in arguments]
    if arguments[:3] != ["release", "create", f"v{version}"]:
        faults.append(f"not a release of the tag: gh {shlex.join(arguments)}")
    if ["--repo", REPOSITORY] not in [arguments[index : index + 2] for index in range(len(arguments))]:
        faults.append("the draft is in no repository")
    files = [folder / word for word in arguments[3:] if not word.startswith("-") and word != REPOSITORY]
    if sorted(file.name for file in files) != expected or not all(file.is_file() for file in files):
        faults.append(f"attached are {sorted(file.name for file in files)}, not {expected}")
    return faults


def all_faults(text, dist, folder):
    """Faults of a workflow."""
    workflow = yaml.safe_load(text)
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    jobs = workflow["jobs"]
    # YAML 1.1 reads `on` as a truth value.
    faults = list(tag_faults(workflow[True]["push"]["tags"], version))
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    faults += [f"`make {name}` is no target" for script in scripts for name in made(script) if name not in targets()]
    before = [name for step in jobs["build"]["steps"] for name in made(step.get("run", ""))]
    faults += [f"`make {name}` is not run" for name in NEEDED if name not in before]
    # Text of an expression would be a part of the script.
    faults += [f"a script has an expression: {script}" for script in scripts if "${{" in script]
    if jobs["draft"].get("needs") != "build":
        faults.append("the draft does not wait for the tests")
    if workflow["permissions"] != {}:
        faults.append("jobs have permissions that they do not name")
    writing = [name for name, job in jobs.items() if "write" in str(job["permissions"])]
    if writing != ["draft"] or any(list(made(step.get("run", ""))) for step in jobs["draft"]["steps"]):
        faults.append(f"{writing} may write")
    uploads = [step["with"] for step in jobs["build"]["steps"] if "upload-artifact" in step.get("uses", "")]
    downloads = [step["with"] for step in jobs["draft"]["steps"] if "download-artifact" in step.get("uses", "")]
    if [upload["path"] for upload in uploads] != ["target/dist/"] or [upload["name"] for upload in uploads] != [
        download["name"] for download in downloads
    ]:
        faults.append("the draft does not get what `make dist` wrote")
    faults += version_faults(jobs["build"]["steps"], version)
    return faults + draft_faults(jobs["draft"], version, dist, folder)


def main():
    dist, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    text = WORKFLOW.read_text()
    faults = all_faults(text, dist, folder)
    for old, new in MISTAKES:
        broken = text.replace(old, new, 1)
        if broken == text:
            faults.append(f"the workflow has nothing like {old}: renew MISTAKES")
        elif not (found := all_faults(broken, dist, folder)):
            faults.append(f"{new!r} in place of {old!r} is not noticed")
        else:
            print(f"{new!r} in place of {old!r}: {found[0]}")
    for fault in faults:
        print(f"{WORKFLOW.name}: {fault}", file=sys.stderr)
    print(f"= a draft with {len(list(dist.iterdir()))} files; {len(MISTAKES)} mistakes in the workflow are noticed")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
