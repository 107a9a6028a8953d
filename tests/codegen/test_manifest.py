"""manifest.json: it reads back as it was written, and a damaged artifact is told apart from a whole one."""

import json

import pytest

from kimigraph.codegen import build_artifact
from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.ir.manifest import Manifest, verify_artifact


@pytest.fixture
def artifact(programs, artifact_directory):
    build_artifact(programs["lightning_indexer"](), "cpu:reference", artifact_directory)
    return artifact_directory


def test_round_trip(artifact):
    manifest = verify_artifact(artifact)
    text = (artifact / "manifest.json").read_text(encoding="utf-8")
    manifest.write(artifact)
    assert (artifact / "manifest.json").read_text(encoding="utf-8") == text
    assert manifest == Manifest.read(artifact)
    assert manifest.inputs[3].value_range == (1, 8)
    assert manifest.inputs[4].mutated
    assert (manifest.model, manifest.phase, manifest.shape_key) == ("toy", "decode", "B2-N1-C8")


@pytest.mark.parametrize("path", ["program.py", "kernels/reference.py", "support/seeded.py"])
def test_a_changed_file_is_named_with_the_remedy(artifact, path):
    file = artifact / path
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)
    with pytest.raises(CorruptArtifactError) as caught:
        verify_artifact(artifact)
    assert str(file) in str(caught.value)
    assert "compile it again" in str(caught.value)
    assert caught.value.exit_code == 5


def test_a_truncated_file_is_named(artifact):
    file = artifact / "program.py"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CorruptArtifactError, match=r"program\.py has \d+ bytes"):
        verify_artifact(artifact)


def test_a_missing_file_is_named(artifact):
    (artifact / "kernels" / "reference.py").unlink()
    with pytest.raises(CorruptArtifactError, match=r"reference\.py is missing"):
        verify_artifact(artifact)


def test_a_directory_without_manifest_is_no_artifact(tmp_path):
    with pytest.raises(CorruptArtifactError, match="is no artifact"):
        verify_artifact(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"x"', '{"schema_version": 1}', "\x80\x04pickle"])
def test_a_manifest_that_does_not_read_is_one_paragraph(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptArtifactError, match=r"manifest\.json cannot be read"):
        verify_artifact(tmp_path)


def test_a_later_form_is_told_apart_from_damage(artifact):
    document = json.loads((artifact / "manifest.json").read_text())
    document["schema_version"] = 99
    (artifact / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(CorruptArtifactError, match="schema version 99"):
        Manifest.read(artifact)


@pytest.mark.parametrize("path", ["../outside.py", "/etc/hostname", "kernels/../../outside.py"])
def test_a_listed_file_outside_the_artifact_is_refused(artifact, path):
    document = json.loads((artifact / "manifest.json").read_text())
    document["files"][0]["path"] = path
    (artifact / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(CorruptArtifactError, match="outside the artifact"):
        verify_artifact(artifact)


def test_identity_follows_the_files(artifact, programs, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    same = build_artifact(programs["lightning_indexer"](), "cpu:reference", other)
    assert same.identity() == Manifest.read(artifact).identity()
    third = tmp_path / "third"
    third.mkdir()
    assert build_artifact(programs["linear"](), "cpu:reference", third).identity() != same.identity()
