# SPDX-License-Identifier: MIT
"""patchq on a made-up project."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import FILES, HEADER, PATCHQ, TREE, Project, make_sdist, run, snapshot

FIRST = "0601-kvcache-hook.patch"
SECOND = "0702-arg-more.patch"


def times(project: Project) -> dict:
    return {str(p): p.stat().st_mtime_ns for p in project.src.rglob("*") if p.is_file()}


def test_apply_changes_the_files(patched: Project) -> None:
    a = (patched.tree / "src" / "a.cpp").read_text()
    assert "line 20\nhook();\nmore();\nline 21\n" in a
    assert (patched.tree / "src" / "b.cpp").read_text() == "int b;\nhook();\n"
    assert (patched.tree / "src" / "new.cpp").read_text() == "int n;\n"


def test_apply_in_an_ignored_folder_of_a_repository(patched: Project) -> None:
    # `git apply` skips files that an outer repository ignores, and says nothing.
    shutil.rmtree(patched.src)
    (patched.root / ".gitignore").write_text("/vendor/src/\n/vendor/.patchq-*/\n")
    patched.git(patched.root, "init", "--quiet")
    assert patched.patchq("apply").returncode == 0
    assert "hook();" in (patched.tree / "src" / "a.cpp").read_text()


def test_second_apply_is_a_no_op(patched: Project) -> None:
    before = times(patched)
    done = patched.patchq("apply")
    assert done.returncode == 0
    assert "applied already" in done.stderr
    assert times(patched) == before


def test_changed_series_rewrites_only_what_changes(patched: Project) -> None:
    before = times(patched)
    (patched.patches / "series").write_text(FIRST + "\n")
    done = patched.patchq("apply")
    assert done.returncode == 0, done.stderr
    after = times(patched)
    changed = {Path(p).name for p in set(before) | set(after) if before.get(p) != after.get(p) and ".kvsplit" not in p}
    assert changed == {"a.cpp", "new.cpp"}, "b.cpp keeps its time"
    assert "more();" not in (patched.tree / "src" / "a.cpp").read_text()
    assert not (patched.tree / "src" / "new.cpp").exists()


def test_empty_series_gives_the_pristine_tree(patched: Project) -> None:
    (patched.patches / "series").write_text("")
    assert patched.patchq("apply").returncode == 0
    fresh = snapshot(patched.tree)
    shutil.rmtree(patched.src)
    assert patched.fetch().returncode == 0
    assert snapshot(patched.tree) == fresh


@pytest.mark.parametrize("name", ["src/a.cpp", "src/new.cpp"])
def test_hand_edited_tree_is_refused(patched: Project, name: str) -> None:
    path = patched.tree / name
    path.write_text(path.read_text() + "mine\n")
    before = snapshot(patched.src)
    for _ in range(2):
        done = patched.patchq("apply")
        assert done.returncode == 4
        assert f"{TREE}/{name}" in done.stderr
        assert "edit --take-edits" in done.stderr and "--discard-edits" in done.stderr
        assert snapshot(patched.src) == before


def test_hand_edit_before_the_first_apply_is_refused(project: Project) -> None:
    project.make_series()
    path = project.tree / "src" / "b.cpp"
    path.write_text("mine\n")
    assert project.patchq("apply").returncode == 4
    assert path.read_text() == "mine\n"


def test_edits_can_be_kept(patched: Project) -> None:
    path = patched.tree / "src" / "b.cpp"
    path.write_text(path.read_text() + "mine\n")
    folder = patched.root / "kept"
    done = patched.patchq("edit", "--take-edits", "--dir", folder)
    assert done.returncode == 0, done.stderr
    assert patched.git(folder, "diff", "--name-only").split() == ["src/b.cpp"]
    assert (folder / "src" / "b.cpp").read_text().endswith("mine\n")


def test_edits_can_be_dropped_and_a_copy_stays(patched: Project) -> None:
    path = patched.tree / "src" / "b.cpp"
    path.write_text("mine\n")
    assert patched.patchq("apply", "--discard-edits").returncode == 0
    assert path.read_text() == "int b;\nhook();\n"
    copies = list((patched.root / "vendor" / "discarded").rglob("b.cpp"))
    assert [c.read_text() for c in copies] == ["mine\n"]


OTHERS = [f"{TREE}/tool.sh", f"{TREE}/.gitignore", "README.md"]  # no patch touches them


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("how", ["changed", "same size", "removed"])
def test_hand_edit_of_a_file_that_no_patch_touches(patched: Project, name: str, how: str) -> None:
    path = patched.src / name
    old = path.read_text()
    mode = path.stat().st_mode
    if how == "removed":
        path.unlink()
    else:
        path.write_text("#error\n" + old if how == "changed" else "x" + old[1:])
    mine = path.read_text() if path.exists() else None
    before = snapshot(patched.src)
    done = patched.patchq("apply")
    assert done.returncode == 4, done.stderr
    assert name in done.stderr and ("(missing)" in done.stderr) == (how == "removed")
    assert snapshot(patched.src) == before
    state = json.loads(patched.patchq("status", "--json").stdout)
    assert state["edited"] == [name] and state["tree"] != "patched"
    times_before = times(patched)
    done = patched.patchq("apply", "--discard-edits")
    assert done.returncode == 0, done.stderr
    assert path.read_text() == old and path.stat().st_mode == mode
    kept = [p.read_text() for p in (patched.root / "vendor" / "discarded").rglob("*") if p.is_file()]
    assert kept == ([] if mine is None else [mine])
    times_after = times(patched)
    changed = {p for p in times_after if times_after[p] != times_before.get(p) and "/.kvsplit" not in p}
    assert changed == {str(path)}, "every other file keeps its time"
    assert "applied already" in patched.patchq("apply").stderr
    assert json.loads(patched.patchq("status", "--json").stdout)["tree"] == "patched"


def test_touched_file_that_is_gone(patched: Project) -> None:
    (patched.tree / "src" / "b.cpp").unlink()
    done = patched.patchq("apply")
    assert done.returncode == 4 and "src/b.cpp (missing)" in done.stderr
    assert patched.patchq("apply", "--discard-edits").returncode == 0
    assert (patched.tree / "src" / "b.cpp").read_text() == "int b;\nhook();\n"


def test_edits_of_other_files_can_be_kept(patched: Project) -> None:
    (patched.tree / "tool.sh").write_text("mine\n")
    (patched.tree / ".gitignore").unlink()
    (patched.src / "README.md").write_text("mine\n")
    folder = patched.root / "kept"
    done = patched.patchq("edit", "--take-edits", "--dir", folder)
    assert done.returncode == 0, done.stderr
    assert patched.git(folder, "status", "--porcelain").splitlines() == [" D .gitignore", " M tool.sh"]
    assert (folder / "tool.sh").read_text() == "mine\n"
    assert "not taken over" in done.stderr and "README.md" in done.stderr


def test_edit_starts_from_upstreams_files(patched: Project) -> None:
    (patched.tree / "tool.sh").write_text("mine\n")
    (patched.tree / ".gitignore").unlink()
    folder = patched.root / "kept"
    assert patched.patchq("edit", "--dir", folder).returncode == 0
    assert patched.git(folder, "status", "--porcelain") == ""
    assert (folder / "tool.sh").read_text() == FILES[f"{TREE}/tool.sh"]
    assert (folder / ".gitignore").read_text() == FILES[f"{TREE}/.gitignore"]


def test_tree_of_an_older_version_gets_a_manifest(patched: Project) -> None:
    manifest = patched.src / ".kvsplit-files"
    before = manifest.read_text()
    manifest.unlink()
    files = times(patched)
    assert "applied already" in patched.patchq("apply").stderr
    assert manifest.read_text() == before
    assert {k: v for k, v in times(patched).items() if k != str(manifest)} == files
    manifest.write_text("damaged")
    assert patched.patchq("apply").returncode == 0
    assert manifest.read_text() == before
    manifest.unlink()
    (patched.tree / "tool.sh").write_text("mine\n")
    assert patched.patchq("apply").returncode == 4, "an edit made before is seen as well"


def test_copy_with_other_times_is_no_edit(patched: Project) -> None:
    for path in patched.src.rglob("*"):
        if path.is_file():
            path.touch()
    done = patched.patchq("apply")
    assert done.returncode == 0 and "applied already" in done.stderr
    before = times(patched)
    assert patched.patchq("apply").returncode == 0
    assert times(patched) == before, "the new times are known now"


def test_file_that_nobody_packed_is_ignored(patched: Project) -> None:
    path = patched.tree / "src" / "notes.txt"
    path.write_text("mine\n")
    assert "applied already" in patched.patchq("apply").stderr
    assert path.read_text() == "mine\n"


def test_leftovers_of_a_killed_run_are_removed(patched: Project) -> None:
    vendor = patched.root / "vendor"
    stale = [vendor / ".unpack-abcd_123", vendor / ".patchq-abcd_123"]
    mine = [vendor / ".patchq-notes", vendor / ".unpack-ABCD_123", vendor / "patchq-abcd_123"]
    for folder in stale + mine:
        folder.mkdir()
        (folder / "file").write_text("x")
    half = patched.tree / "src" / ".patchq-abcd_123"
    half.write_text("half a file")
    assert patched.patchq("apply").returncode == 0
    assert not [p for p in [*stale, half] if p.exists()]
    assert all((p / "file").is_file() for p in mine)


def test_work_folder_in_use_is_not_removed(patched: Project) -> None:
    # verify and apply at once: neither may take the other's folder away
    env = {**os.environ, **patched.env()}
    commands = [[sys.executable, str(PATCHQ), c, "--root", str(patched.root)] for c in ("verify", "apply") * 3]
    pipe = subprocess.PIPE
    runs = [subprocess.Popen(c, env=env, stdout=pipe, stderr=pipe) for c in commands]
    for r in runs:
        _, err = r.communicate(timeout=60)
        assert r.returncode == 0, err


@pytest.mark.parametrize("fault", ["context", "offset"])
def test_patch_that_does_not_fit(patched: Project, fault: str) -> None:
    path = patched.patches / SECOND
    text = path.read_text()
    if fault == "context":
        path.write_text(text.replace(" line 21\n", " line 99\n"))
    else:  # git alone would accept a hunk that has moved
        at = text.index("@@ -")
        end = text.index("@@", at + 2)
        path.write_text(text[:at] + "@@ -9,6 +9,7 " + text[end:])
    before = snapshot(patched.src)
    done = patched.patchq("apply")
    assert done.returncode == 3, done.stderr
    assert SECOND in done.stderr
    assert "Next: " in done.stderr and "edit" in done.stderr
    assert snapshot(patched.src) == before, "all or nothing"
    assert not list((patched.root / "vendor").glob(".patchq-*"))


def test_patch_outside_the_tree_is_refused(patched: Project) -> None:
    path = patched.patches / SECOND
    path.write_text(path.read_text().replace("src/new.cpp", "../../evil.cpp"))
    assert patched.patchq("apply").returncode == 3
    assert not list(patched.root.rglob("evil.cpp"))


def test_interrupted_apply_can_be_repeated(patched: Project) -> None:
    # As a run leaves it that stops between the first file and the last: both states are ours.
    stamp = patched.src / ".kvsplit-patched"
    state = json.loads(stamp.read_text())
    pristine = json.loads((patched.src / ".kvsplit-source").read_text())["files"]
    both = {k: v + [pristine.get(k, "")] for k, v in state["files"].items()}
    stamp.write_text(json.dumps({"state": "", "files": both}))
    (patched.tree / "src" / "b.cpp").write_text("int b;\n")
    done = patched.patchq("apply")
    assert done.returncode == 0, done.stderr
    assert (patched.tree / "src" / "b.cpp").read_text() == "int b;\nhook();\n"


def test_round_trip_is_byte_identical(patched: Project) -> None:
    before = snapshot(patched.patches)
    folder = patched.root / "again"
    assert patched.patchq("edit", "--dir", folder).returncode == 0
    assert patched.patchq("export", "--dir", folder).returncode == 0
    assert snapshot(patched.patches) == before


def test_user_settings_do_not_change_an_export(patched: Project, tmp_path: Path) -> None:
    before = snapshot(patched.patches)
    config = tmp_path / "gitconfig"
    config.write_text(
        "[diff]\n noprefix = true\n context = 9\n algorithm = patience\n mnemonicPrefix = true\n external = false\n"
        "[core]\n autocrlf = true\n abbrev = 40\n[color]\n ui = always\n[commit]\n gpgsign = true\n"
    )
    folder = patched.root / "again"
    env = {"GIT_CONFIG_GLOBAL": str(config), "HOME": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}
    assert patched.patchq("edit", "--dir", folder, **env).returncode == 0
    for key, value in (("diff.noprefix", "true"), ("diff.context", "0"), ("color.ui", "always")):
        patched.git(folder, "config", key, value)
    assert patched.patchq("export", "--dir", folder, **env).returncode == 0
    assert snapshot(patched.patches) == before


def test_foreign_repository_with_upstream_as_first_commit(patched: Project) -> None:
    folder = patched.root / "by hand"
    patched.patchq("edit", "--dir", folder)
    shutil.rmtree(folder / ".git")
    shutil.copytree(patched.tree, folder, dirs_exist_ok=True)
    (patched.patches / "series").write_text("")
    patched.patchq("apply")
    shutil.copytree(patched.tree, folder, dirs_exist_ok=True)
    (folder / "src" / "new.cpp").unlink()
    patched.git(folder, "init", "--quiet")
    patched.git(folder, "add", "--all")
    patched.git(folder, "commit", "--quiet", "-m", "upstream")
    (folder / "src" / "b.cpp").write_text("int bb;\n")
    patched.commit(folder, "0801-fault-b.patch", "b: mend it")
    for name in (FIRST, SECOND):
        (patched.patches / name).unlink()
    done = patched.patchq("export", "--dir", folder)
    assert done.returncode == 0, done.stderr
    assert (patched.patches / "series").read_text() == "0801-fault-b.patch\n"
    assert patched.patchq("verify").returncode == 0


def test_exported_file_has_no_hash_date_or_author(patched: Project) -> None:
    text = (patched.patches / FIRST).read_text()
    for word in ("index ", "From ", "Date:", "someone", "GIT", "2000"):
        assert word not in text
    assert text.startswith("kvcache: a hook\n\nWhy: because\n")


def scratch(project: Project) -> Path:
    folder = project.root / "scratch"
    assert project.patchq("edit", "--dir", folder).returncode == 0
    return folder


def exported(project: Project, folder: Path, code: int, *words: str) -> None:
    before = snapshot(project.patches)
    done = project.patchq("export", "--dir", folder)
    assert done.returncode == code, done.stderr
    for word in words:
        assert word in done.stderr
    assert snapshot(project.patches) == before, "a refused export writes nothing"


def test_commit_without_a_name_is_refused(patched: Project) -> None:
    folder = scratch(patched)
    (folder / "src" / "b.cpp").write_text("x\n")
    patched.git(folder, "commit", "--quiet", "-a", "-m", "something")
    exported(patched, folder, 7, "Patch-Name", "something")


@pytest.mark.parametrize("field", ["Why", "Why-not-a-file", "Hook", "Drop-when", "Test"])
def test_commit_with_a_missing_field_is_refused(patched: Project, field: str) -> None:
    folder = scratch(patched)
    (folder / "src" / "b.cpp").write_text("x\n")
    lines = HEADER.format(subject="s", name="0603-kvcache-x.patch").split("\n")
    message = "\n".join(ln for ln in lines if not ln.startswith(field + ":"))
    patched.git(folder, "commit", "--quiet", "-a", "-m", message)
    exported(patched, folder, 6, f"'{field}:'")


@pytest.mark.parametrize("name", ["1101-x-y.patch", "601-x-y.patch", "0601-X-y.patch", "0601-x.patch", "0601-x-y.diff"])
def test_wrong_name_is_refused(patched: Project, name: str) -> None:
    folder = scratch(patched)
    (folder / "src" / "b.cpp").write_text("x\n")
    patched.commit(folder, name)
    exported(patched, folder, 5, "GGSS")


def test_number_used_twice_is_refused(patched: Project) -> None:
    folder = scratch(patched)
    (folder / "src" / "b.cpp").write_text("x\n")
    patched.commit(folder, "0601-kvcache-other.patch")
    exported(patched, folder, 5, "0601", "twice")


def test_merge_is_refused(patched: Project) -> None:
    folder = scratch(patched)
    patched.git(folder, "checkout", "--quiet", "-b", "side", "HEAD~1")
    (folder / "src" / "b.cpp").write_text("x\n")
    patched.commit(folder, "0603-kvcache-x.patch")
    patched.git(folder, "merge", "--quiet", "-m", "merge", "kvsplit")
    exported(patched, folder, 7, "merge")


def test_binary_change_is_refused(patched: Project) -> None:
    folder = scratch(patched)
    (folder / "x.dat").write_bytes(b"\0\1\2")
    patched.commit(folder, "0603-kvcache-x.patch")
    exported(patched, folder, 7, "binary")


def test_foreign_base_is_refused(patched: Project) -> None:
    folder = scratch(patched)
    shutil.rmtree(folder / ".git")
    patched.git(folder, "init", "--quiet")
    (folder / "src" / "b.cpp").write_text("not upstream's\n")
    patched.git(folder, "add", "--all")
    patched.git(folder, "commit", "--quiet", "-m", "base")
    (folder / "src" / "b.cpp").write_text("x\n")
    patched.commit(folder, "0603-kvcache-x.patch")
    exported(patched, folder, 7, "src/b.cpp", "pinned")


def test_unknown_patch_file_is_not_removed(patched: Project) -> None:
    (patched.patches / "mine.patch").write_text("mine\n")
    folder = scratch(patched)
    exported(patched, folder, 5, "mine.patch")


def test_dropped_commit_drops_the_file(patched: Project) -> None:
    folder = scratch(patched)
    patched.git(folder, "reset", "--quiet", "--hard", "HEAD~1")
    done = patched.patchq("export", "--dir", folder)
    assert done.returncode == 0 and SECOND in done.stderr
    assert not (patched.patches / SECOND).exists()
    assert (patched.patches / "series").read_text() == FIRST + "\n"


def test_edit_does_not_overwrite(patched: Project) -> None:
    folder = patched.root / "mine"
    folder.mkdir()
    (folder / "x").write_text("x")
    assert patched.patchq("edit", "--dir", folder).returncode == 1
    assert [p.name for p in folder.iterdir()] == ["x"]


def test_verify(patched: Project) -> None:
    done = patched.patchq("verify")
    assert done.returncode == 0, done.stderr
    assert "2 patches" in done.stdout and "added    4 lines of at most 500" in done.stdout


@pytest.mark.parametrize(
    "fault, code",
    [
        ("file missing", 5),
        ("file extra", 5),
        ("index row missing", 5),
        ("index out of date", 5),
        ("header field missing", 6),
        ("test missing", 6),
        ("name differs", 6),
        ("not round", 7),
        ("retired number", 5),
        ("no diff", 6),
        ("does not apply", 3),
    ],
)
def test_verify_finds(patched: Project, fault: str, code: int) -> None:
    path = patched.patches / FIRST
    text = path.read_text()
    index = patched.patches / "README.md"
    if fault == "file missing":
        path.unlink()
    elif fault == "file extra":
        (patched.patches / "0603-kvcache-extra.patch").write_text(text)
    elif fault == "index row missing":
        index.write_text("".join(ln for ln in index.read_text().splitlines(True) if SECOND not in ln))
    elif fault == "index out of date":
        index.write_text(index.read_text().replace("arg: more", "arg: less"))
    elif fault == "header field missing":
        path.write_text(text.replace("Hook: a.cpp\n", ""))
    elif fault == "test missing":
        (patched.root / "tests" / "test_hook.py").unlink()
    elif fault == "name differs":
        path.write_text(text.replace(f"Patch-Name: {FIRST}", f"Patch-Name: {SECOND}"))
    elif fault == "not round":
        path.write_text(text.replace("\n---\n", "\n\n---\n"))
    elif fault == "retired number":
        (patched.patches / "retired").write_text("0601-kvcache-older.patch\n")
    elif fault == "no diff":
        path.write_text(text.split("---\n")[0])
    else:
        path.write_text(text.replace(" line 21\n", " line 99\n"))
    done = patched.patchq("verify")
    assert done.returncode == code, done.stderr
    assert "error" in done.stderr and "Traceback" not in done.stderr


def test_verify_bounds_added_lines(patched: Project) -> None:
    folder = scratch(patched)
    (folder / "src" / "b.cpp").write_text("int b;\nhook();\n" + "x;\n" * 497)  # 4 + 497 = 501
    patched.commit(folder, "0603-kvcache-long.patch")
    assert patched.patchq("export", "--dir", folder).returncode == 0
    done = patched.patchq("verify")
    assert done.returncode == 8
    assert "added    501 lines" in done.stdout


def new_release(project: Project, a: str, b: str = "int b;\n") -> str:
    """Write the archive of release 1.1 and return its sha256."""
    files = {f"{TREE}/src/a.cpp": a, f"{TREE}/src/b.cpp": b, f"{TREE}/src/c.cpp": "int c;\n"}
    return make_sdist(project.root / "made_up-1.1.tar.gz", files, "made_up-1.1")


def test_pristine(patched: Project) -> None:
    folder = patched.root / "pristine"
    assert patched.patchq("pristine", "--dir", folder).returncode == 0
    files = {name[len(TREE) + 1 :]: text.encode() for name, text in FILES.items() if name.startswith(TREE)}
    assert snapshot(folder) == files
    assert patched.patchq("pristine", "--dir", folder).returncode == 1, "nothing is overwritten"


def test_bump(patched: Project) -> None:
    lines = "".join(f"line {i}\n" for i in range(40))
    sha = new_release(patched, "first\nsecond\n" + lines)
    archive = patched.root / "made_up-1.1.tar.gz"
    done = patched.patchq("bump", "--version", "1.1", "--sha256", sha, "--sdist", archive)
    assert done.returncode == 0, done.stderr
    lock = (patched.root / "vendor" / "llama_cpp.lock").read_text()
    assert "version = 1.1" in lock and sha in lock and "made_up-1.1.tar.gz" in lock and lock.startswith("# pinned")
    env = {"KVSPLIT_LLAMA_CPP_SDIST": str(archive)}
    done = patched.patchq("apply", **env)
    assert done.returncode == 0, done.stderr
    assert (patched.tree / "src" / "a.cpp").read_text().startswith("first\n")
    assert "hook();\nmore();\n" in (patched.tree / "src" / "a.cpp").read_text()
    assert (patched.tree / "src" / "c.cpp").is_file()
    assert patched.patchq("verify", **env).returncode == 0


def test_bump_stops_at_a_conflict_and_goes_on(patched: Project) -> None:
    lines = "".join("changed\n" if i in (20, 21) else f"line {i}\n" for i in range(40))
    sha = new_release(patched, lines)
    before = snapshot(patched.patches)
    lock = (patched.root / "vendor" / "llama_cpp.lock").read_text()
    args = ("bump", "--version", "1.1", "--sha256", sha, "--sdist", patched.root / "made_up-1.1.tar.gz")
    done = patched.patchq(*args)
    assert done.returncode == 3, done.stderr
    assert FIRST in done.stderr and "src/a.cpp" in done.stderr and "--continue" in done.stderr
    assert snapshot(patched.patches) == before
    assert (patched.root / "vendor" / "llama_cpp.lock").read_text() == lock
    assert patched.patchq(*args).returncode == 1, "a scratch repository is not overwritten"
    assert patched.patchq("bump", "--continue").returncode == 3, "the conflict is still open"
    folder = patched.root / "vendor" / "bump"
    (folder / "src" / "a.cpp").write_text(lines.replace("changed\nchanged\n", "changed\nhook();\nchanged\n"))
    patched.git(folder, "add", "--all")
    patched.git(folder, "-c", "core.editor=true", "cherry-pick", "--continue")
    done = patched.patchq("bump", "--continue")
    if done.returncode == 3:  # the second patch stands on the first one's lines
        assert SECOND in done.stderr
        (folder / "src" / "a.cpp").write_text(
            lines.replace("changed\nchanged\n", "changed\nhook();\nmore();\nchanged\n")
        )
        patched.git(folder, "add", "--all")
        patched.git(folder, "-c", "core.editor=true", "cherry-pick", "--continue")
        done = patched.patchq("bump", "--continue")
    assert done.returncode == 0, done.stderr
    assert (patched.patches / "series").read_text() == f"{FIRST}\n{SECOND}\n"
    assert "version = 1.1" in (patched.root / "vendor" / "llama_cpp.lock").read_text()


def test_bump_with_a_wrong_hash(patched: Project) -> None:
    new_release(patched, "x\n")
    done = patched.patchq(
        "bump", "--version", "1.1", "--sha256", "0" * 64, "--sdist", patched.root / "made_up-1.1.tar.gz"
    )
    assert done.returncode == 2
    assert not (patched.root / "vendor" / "bump").exists()


def test_status(patched: Project) -> None:
    done = patched.patchq("status", "--json")
    assert done.returncode == 0
    state = json.loads(done.stdout)
    assert state["patches"] == [FIRST, SECOND] and state["added_lines"] == 4
    assert state["tree"] == "patched" and state["edited"] == []
    version, sha, patches = patched.patchq("status", "--build").stdout.split()
    assert (version, sha, patches) == (state["version"], state["sha256"], state["patches_sha256"])
    (patched.tree / "src" / "a.cpp").write_text("mine\n")
    assert json.loads(patched.patchq("status", "--json").stdout)["edited"] == [f"{TREE}/src/a.cpp"]


def test_patches_hash_sees_every_byte_and_the_order(patched: Project) -> None:
    def digest() -> str:
        return patched.patchq("status", "--build").stdout.split()[2]

    first = digest()
    path = patched.patches / SECOND
    text = path.read_text()
    path.write_text(text.replace("Why: because", "Why: for"))
    assert digest() != first
    path.write_text(text)
    assert digest() == first
    (patched.patches / "series").write_text(f"{SECOND}\n{FIRST}\n")
    assert digest() != first


def test_usage_exit_code_and_help() -> None:
    assert run(sys.executable, PATCHQ).returncode == 1
    assert run(sys.executable, PATCHQ, "no-such-command").returncode == 1
    done = run(sys.executable, PATCHQ, "--help")
    assert done.returncode == 0
    assert "Exit codes:" in done.stdout
