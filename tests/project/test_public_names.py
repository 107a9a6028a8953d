"""What users import exists, and importing it is lazy."""

import subprocess
import sys

import kimigraph


def test_every_public_name_resolves() -> None:
    assert [name for name in kimigraph.__all__ if getattr(kimigraph, name, None) is None] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(kimigraph, "no_such_name")


def test_importing_the_package_imports_neither_torch_nor_triton() -> None:
    code = "import sys, kimigraph; print(sorted({'torch', 'triton', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_short_names_of_the_linked_folders_cannot_be_imported() -> None:
    code = (
        "import importlib\n"
        "for name in ('passes', 'codegen', 'runtime'):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        print(f'kimigraph.{name}' in str(error) or error.name == name)\n"
        "    else:\n"
        "        print(f'{name} was imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 3
