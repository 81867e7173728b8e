"""Build the simulated accelerator's C++, once for each state of its sources."""

import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

NAME = 'torchgpipe_sim'
SOURCES = Path(__file__).parent / 'csrc'
FLAGS = ['-O1', '-DAT_PER_OPERATOR_HEADERS']


def reason():
    """Say why there can be no simulated accelerator here; nothing if there can be one."""
    if torch.__version__ < '2.13':  # There it ends the process in convolutions.
        return 'the simulated accelerator is for torch 2.13 and newer'
    if _library().exists():
        return ''
    if sys.platform != 'linux':
        return 'the simulated accelerator is for Linux'
    if shutil.which(os.environ.get('CXX', 'c++')) is None:
        return 'the simulated accelerator needs a C++ compiler'
    if not Path(sysconfig.get_path('include'), 'Python.h').exists():
        return "the simulated accelerator needs Python's headers"
    if not _find_ninja():
        return 'the simulated accelerator needs ninja'
    return ''


def extension():
    """Return the built module."""
    library = _library()
    if not library.exists():
        _build(library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_ninja():
    """Return whether there is a ninja, also where the package of that name keeps it."""
    try:
        from ninja import BIN_DIR
    except ImportError:
        pass
    else:
        os.environ['PATH'] += os.pathsep + BIN_DIR
    return shutil.which('ninja') is not None


def _library():
    """Return the path of the library: another one for other sources, another PyTorch or Python."""
    digest = hashlib.sha256(repr((torch.__version__, sys.version, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return _cache() / digest.hexdigest()[:16] / f'{NAME}.so'


def _cache():
    for name, below in (('TORCHGPIPE_SIM_CACHE', ''), ('TORCH_EXTENSIONS_DIR', NAME)):
        if name in os.environ:
            return Path(os.environ[name], below)
    user = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(user, 'torchgpipe', NAME)


def _build(library):
    import fcntl

    from torch.utils.cpp_extension import load

    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / 'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, others wait
        if library.exists():
            return
        # Beside its place, and moved there when it is whole, should this process be ended.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            load(
                NAME,
                [str(source) for source in sorted(SOURCES.glob('*.cpp'))],
                extra_cflags=FLAGS,
                build_directory=folder,
                is_python_module=False,
                is_standalone=False,
            )
            os.replace(Path(folder, library.name), library)
