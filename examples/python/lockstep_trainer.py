"""Sends the weights of a model from Python to a Lockstep cluster: one file over the C library
(liblockstep_trainer.so), with the calls that users of vLLM's weight transfer know.

    import lockstep_trainer as lockstep

    trainer = lockstep.trainer_init({"endpoint": "tcp://engine:7100", "backend": "nccl"})
    with trainer.update(version="step-7", pause="keep"):
        lockstep.trainer_send_weights(trainer, model.named_parameters(), packed=True)
    print(trainer.weight_info())

Backends: "tcp" and "shm" take numpy arrays and torch CPU tensors; "nccl" and "ipc" take torch CUDA
tensors (ipc: of the GPU that the engine uses). Only what is used is imported: numpy alone will do for
tcp and shm. Errors are LockstepError with the cluster's own text. One thread at a time.
"""

import base64
import contextlib
import ctypes
import json
import os
import pickle

DIMS = 8
DEFAULT_BUFFER = 1 << 30
UNAVAILABLE = -7  # LST_ERR_UNAVAILABLE


class LockstepError(RuntimeError):
    """A call that was refused or failed; status is the library's negative number."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


# ---- the C library (lockstep_trainer.h) ----


class _Options(ctypes.Structure):
    _fields_ = [("endpoint", ctypes.c_char_p), ("admin_key", ctypes.c_char_p),
                ("timeout_s", ctypes.c_double), ("no_progress_s", ctypes.c_double)]


class _Tensor(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("dtype", ctypes.c_char_p), ("ndim", ctypes.c_uint),
                ("shape", ctypes.c_uint64 * DIMS), ("data", ctypes.c_void_p)]


class _Tcp(ctypes.Structure):
    _fields_ = [("bind_host", ctypes.c_char_p), ("port", ctypes.c_uint16),
                ("advertise_host", ctypes.c_char_p), ("connections", ctypes.c_uint)]


class _Shm(ctypes.Structure):
    _fields_ = [("ring_bytes", ctypes.c_uint64), ("unchecked", ctypes.c_bool)]


class _Nccl(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int), ("library", ctypes.c_char_p), ("store", ctypes.c_bool),
                ("bind_host", ctypes.c_char_p), ("port", ctypes.c_uint16),
                ("advertise_host", ctypes.c_char_p), ("packed", ctypes.c_bool),
                ("packed_buffer_size_bytes", ctypes.c_uint64), ("packed_num_buffers", ctypes.c_uint)]


class _Ipc(ctypes.Structure):
    _fields_ = [("device", ctypes.c_int), ("packed", ctypes.c_bool)]


class _Update(ctypes.Structure):
    _fields_ = [("packed", ctypes.c_bool), ("packed_buffer_size_bytes", ctypes.c_uint64)]


class _Stats(ctypes.Structure):
    _fields_ = [("updates", ctypes.c_uint64), ("bytes", ctypes.c_uint64),
                ("transfer_s", ctypes.c_double), ("last_transfer_s", ctypes.c_double),
                ("last_bytes", ctypes.c_uint64), ("last_pause_window_s", ctypes.c_double)]


def _find_library():
    here = os.path.dirname(os.path.abspath(__file__))
    name = "liblockstep_trainer.so"
    given = os.environ.get("LOCKSTEP_TRAINER_LIBRARY")
    for path in [given] if given else [os.path.join(here, name),
                                       os.path.join(here, "../../build/transfer/trainer", name)]:
        if os.path.exists(path):
            return path
    return given or name


def _load_library():
    lib = ctypes.CDLL(_find_library())
    handle, tensors = ctypes.c_void_p, ctypes.POINTER(_Tensor)
    for name, arguments in {
        "lst_open": [ctypes.POINTER(_Options), ctypes.POINTER(handle), ctypes.c_char_p, ctypes.c_size_t],
        "lst_pause": [handle, ctypes.c_char_p, ctypes.c_bool],
        "lst_resume": [handle],
        "lst_init_tcp": [handle, ctypes.POINTER(_Tcp)],
        "lst_init_shm": [handle, ctypes.POINTER(_Shm)],
        "lst_init_nccl": [handle, ctypes.POINTER(_Nccl)],
        "lst_init_ipc": [handle, ctypes.POINTER(_Ipc)],
        "lst_start": [handle],
        "lst_update": [handle, tensors, ctypes.c_size_t, ctypes.POINTER(_Update)],
        "lst_finish": [handle, ctypes.c_char_p],
        "lst_abort": [handle],
        "lst_digest": [handle, tensors, ctypes.c_size_t, ctypes.c_char_p],
        "lst_call": [handle, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    lib.lst_last_error.argtypes, lib.lst_last_error.restype = [handle], ctypes.c_char_p
    lib.lst_close.argtypes, lib.lst_close.restype = [ctypes.POINTER(handle)], None
    lib.lst_stats.argtypes, lib.lst_stats.restype = [handle, ctypes.POINTER(_Stats)], None
    return lib


# ---- tensors ----


def _is_torch(tensor):
    return type(tensor).__module__.split(".")[0] == "torch"


def _prepare(tensor):
    """Contiguous and detached: (object that owns the memory, dtype, shape, address)."""
    if _is_torch(tensor):
        tensor = tensor.detach().contiguous()
        return tensor, str(tensor.dtype).split(".")[-1], tuple(tensor.shape), tensor.data_ptr()
    import numpy

    tensor = numpy.ascontiguousarray(tensor)
    if tensor.dtype.byteorder == ">":
        raise ValueError("big-endian arrays can't be sent")
    return tensor, tensor.dtype.name, tensor.shape, tensor.ctypes.data


def _nbytes(tensor):
    if _is_torch(tensor):
        return tensor.numel() * tensor.element_size()
    return tensor.nbytes


def _chunks(iterator, most):
    """Lists of (name, tensor) of at most `most` bytes together, or of one tensor."""
    chunk, total = [], 0
    for name, tensor in iterator:
        size = _nbytes(tensor)
        if chunk and total + size > most:
            yield chunk
            chunk, total = [], 0
        chunk.append((name, tensor))
        total += size
    if chunk:
        yield chunk


class _TensorArray:
    """What the library reads, and the memory that it points to, for one call."""

    def __init__(self, tensors):
        self.items = (_Tensor * max(len(tensors), 1))()
        self.keep = []
        self.n = len(tensors)
        for item, (name, tensor) in zip(self.items, tensors):
            owner, dtype, shape, address = _prepare(tensor)
            if len(shape) > DIMS:
                raise ValueError(f"{name}: {len(shape)} dimensions, at most {DIMS} are possible")
            self.keep.append((owner, name.encode(), dtype.encode()))
            item.name, item.dtype = self.keep[-1][1], self.keep[-1][2]
            item.ndim, item.data = len(shape), address
            for i, extent in enumerate(shape):
                item.shape[i] = extent


# ---- the trainer ----


class Trainer:
    """One connection to a cluster; trainer_init makes it."""

    def __init__(self, endpoint, backend="tcp", admin_key=None, timeout_s=0.0, no_progress_s=0.0,
                 **options):
        self._lib = _load_library()
        self._handle = ctypes.c_void_p()
        self.backend = backend
        self.packed = bool(options.get("packed", False))
        self.buffer_size = int(options.get("packed_buffer_size_bytes") or DEFAULT_BUFFER)
        self._buffer = self._exported = None
        self._exports = {}  # by name: (what of the tensor it holds for, its storage, its arguments)
        self._texts = {}  # by the first name of a chunk: (its names, their exports, the call's text)
        self.last_reply = None  # to the last update_weights of ipc: what each rank says of it
        self._options = options
        self._broken = False  # a transfer failed: the ranks are to be met again
        given = _Options(endpoint.encode(), admin_key.encode() if admin_key else None, timeout_s,
                         no_progress_s)
        text = ctypes.create_string_buffer(1024)
        status = self._lib.lst_open(given, ctypes.byref(self._handle), text, len(text))
        if status != 0:
            raise LockstepError(status, text.value.decode())
        try:
            self.init()
        except BaseException:
            self.close()
            raise

    def _check(self, status):
        if status != 0:
            raise LockstepError(status, self._lib.lst_last_error(self._handle).decode())

    def init(self):
        """Meets the ranks: all that there are now, which may be fewer than the last time. While the
        cluster forms its group anew it waits. update does it after a transfer that failed."""
        self._meet(self._options)
        self._broken = False

    def _meet(self, options):
        text = lambda key: options[key].encode() if options.get(key) else None
        if self.backend == "tcp":
            self._check(self._lib.lst_init_tcp(self._handle, _Tcp(
                text("bind_host"), options.get("port", 0), text("advertise_host"),
                options.get("connections", 0))))
        elif self.backend == "shm":
            self._check(self._lib.lst_init_shm(self._handle, _Shm(
                options.get("ring_bytes", 0), options.get("unchecked", False))))
        elif self.backend == "nccl":
            self._check(self._lib.lst_init_nccl(self._handle, _Nccl(
                self._device(options), text("library"), options.get("store", False),
                text("bind_host"), options.get("port", 0), text("advertise_host"), self.packed,
                self.buffer_size, options.get("packed_num_buffers", 0))))
        elif self.backend == "ipc":
            self._check(self._lib.lst_init_ipc(self._handle, _Ipc(self._device(options), self.packed)))
        else:
            raise ValueError(f"backend {self.backend!r}: tcp, shm, nccl or ipc")

    def _device(self, options):
        import torch

        given = options.get("device")
        self.device = torch.device("cuda", torch.cuda.current_device() if given is None else given) \
            if given is None or isinstance(given, int) else torch.device(given)
        self.uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return self.device.index or 0

    def close(self):
        self._lib.lst_close(ctypes.byref(self._handle))

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    # calls, as over HTTP

    def call(self, name, arguments=None):
        """Any call of the trainer socket; returns the answer's fields."""
        return self.call_text(name, json.dumps(arguments).encode() if arguments is not None else None)

    def call_text(self, name, text=None):
        """The same, with the arguments as JSON text: bytes, or None for none."""
        reply = ctypes.c_char_p()
        self._check(self._lib.lst_call(self._handle, name.encode(), text, ctypes.byref(reply)))
        return json.loads(reply.value.decode())

    def pause(self, mode="abort", clear_cache=True):
        self._check(self._lib.lst_pause(self._handle, mode.encode(), clear_cache))

    def resume(self):
        self._check(self._lib.lst_resume(self._handle))

    def _pause_whoever_is_left(self, mode, clear_cache):
        try:
            self.pause(mode, clear_cache)
        except LockstepError as error:
            if error.status != UNAVAILABLE:
                raise
            self.init()  # waits while the cluster forms its group anew
            self.pause(mode, clear_cache)

    def _resume_whoever_is_left(self):
        try:
            self.resume()
        except LockstepError as error:
            if error.status != UNAVAILABLE:
                raise
            self.init()
            self.resume()

    def _start_again(self):
        """start_weight_update, after init where the cluster has forgotten who met it: a rank that
        ends takes the connection of all along."""
        try:
            self.start_weight_update()
        except LockstepError as error:
            if "Weight transfer not initialized" not in str(error):
                raise
            self.init()
            self.start_weight_update()

    def start_weight_update(self):
        self._check(self._lib.lst_start(self._handle))

    def finish_weight_update(self, version=None):
        self._check(self._lib.lst_finish(self._handle, version.encode() if version else None))

    def abort_weight_update(self):
        self._check(self._lib.lst_abort(self._handle))

    def weight_info(self):
        return self.call("weight_info")

    def stats(self):
        """Of the library's own transfers: bytes, seconds, the last pause window."""
        stats = _Stats()
        self._lib.lst_stats(self._handle, stats)
        return {name: getattr(stats, name) for name, _ in _Stats._fields_}

    @contextlib.contextmanager
    def update(self, version=None, pause="keep", clear_cache=True):
        """A whole update session: pause (None: don't), start, the block, finish, resume. If the block
        fails the session is aborted and the cluster resumed; the error goes on. The next update then
        begins with init by itself."""
        if self._broken:
            self.init()
        if pause is not None:
            self._pause_whoever_is_left(pause, clear_cache)
        try:
            self._start_again()
            try:
                yield self
                self.finish_weight_update(version)
            except BaseException:
                with contextlib.suppress(LockstepError):
                    self.abort_weight_update()
                raise
        except BaseException:
            if pause is not None:
                with contextlib.suppress(LockstepError):  # the error that counts is the first one
                    self._resume_whoever_is_left()
            raise
        if pause is not None:
            self._resume_whoever_is_left()

    # tensors

    def send_weights(self, iterator, packed=None, chunk_bytes=None):
        """Sends (name, tensor) pairs; returns how many. Chunks of chunk_bytes (default: all at once
        for nccl, whose ranks agree on buckets by themselves; else the packed buffer's size) are held
        in memory at a time."""
        packed = self.packed if packed is None else packed
        n = 0
        if self.backend == "ipc" and packed:
            return self._send_ipc_packed(iterator)
        for chunk in _chunks(iterator, chunk_bytes or (1 << 62 if self.backend == "nccl" else self.buffer_size)):
            n += len(chunk)
            if self.backend == "ipc":
                self._send_ipc(chunk)
            else:
                self._send(chunk, packed)
        return n

    def _send(self, chunk, packed):
        array = _TensorArray(chunk)
        if self.backend == "nccl":
            import torch

            torch.cuda.current_stream(self.device).synchronize()
        self._broken = True
        self._check(self._lib.lst_update(self._handle, array.items, array.n,
                                         _Update(packed, self.buffer_size)))
        self._broken = False

    def _update_text(self, chunk, handles):
        return json.dumps({"update_info": {
            "names": [name for name, _ in chunk],
            "dtype_names": [str(tensor.dtype).split(".")[-1] for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
            **handles}}).encode()

    def _update(self, text):
        self._broken = True
        self.last_reply = self.call_text("update_weights", text)
        self._broken = False

    def _export_once(self, name, tensor):
        """Torch's arguments for a tensor, made again only if its memory is not what it was. Torch
        records an event when it exports, so a kept export says nothing of later writes: the caller
        synchronises. Only a weak reference is kept: freed memory is freed."""
        from torch.multiprocessing.reductions import StorageWeakRef, reduce_tensor

        storage = tensor.untyped_storage()
        key = (storage._cdata, storage.data_ptr(), storage.nbytes(), tensor.storage_offset(),
               tensor.dtype, tuple(tensor.shape))
        known = self._exports.get(name)
        if known is None or known[0] != key or known[1].expired():
            known = self._exports[name] = (key, StorageWeakRef(storage), reduce_tensor(tensor)[1])
        return known

    def _export_text(self, chunk, exports):
        """The call's text for a chunk; the last one, if nothing was exported anew: the ranks know it."""
        names = [name for name, _ in chunk]
        known = self._texts.get(names[0])
        if known is None or known[0] != names or any(a is not b for a, b in zip(known[1], exports)):
            handles = [{self.uuid: arguments} for _, _, arguments in exports]
            known = self._texts[names[0]] = (names, exports, self._update_text(chunk, {
                "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
                "packed": False}))
        return known[2]

    def _send_ipc(self, chunk):
        import torch

        kept = [(name, tensor.detach().contiguous()) for name, tensor in chunk]
        text = self._export_text(kept, [self._export_once(name, tensor) for name, tensor in kept])
        torch.cuda.current_stream(self.device).synchronize()
        try:
            self._update(text)
        except LockstepError:
            self._exports.clear()
            self._texts.clear()
            raise

    def _send_ipc_packed(self, iterator):
        """One buffer, exported once, filled and announced chunk by chunk."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        n = 0
        if self._buffer is None:
            self._buffer = torch.empty(self.buffer_size, dtype=torch.uint8, device=self.device)
            handle = {self.uuid: reduce_tensor(self._buffer)[1]}
            self._exported = base64.b64encode(pickle.dumps(handle)).decode()
        for chunk in _chunks(iterator, self.buffer_size):
            sizes = [_nbytes(tensor) for _, tensor in chunk]
            if sum(sizes) > self.buffer_size:
                raise ValueError(f"{chunk[0][0]}: {sum(sizes)} bytes, more than "
                                 f"packed_buffer_size_bytes {self.buffer_size}")
            at = 0
            for (_, tensor), size in zip(chunk, sizes):
                raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
                self._buffer[at:at + size].copy_(raw)
                at += size
            torch.cuda.current_stream(self.device).synchronize()
            self._update(self._update_text(chunk, {
                "ipc_handles_pickled": self._exported, "tensor_sizes": sizes, "packed": True}))
            n += len(chunk)
        return n

    def digest(self, iterator):
        """The digest that every rank has once exactly these tensors (a whole model) are its weights."""
        array = _TensorArray(list(iterator))
        out = ctypes.create_string_buffer(33)
        self._check(self._lib.lst_digest(self._handle, array.items, array.n, out))
        return out.value.decode()


# ---- the calls that vLLM's users know ----


def trainer_init(init_info):
    """init_info: {"endpoint": "tcp://host:port", "backend": "tcp", ...}; further keys by backend, as in
    lockstep_trainer.h: bind_host, port, advertise_host, connections (tcp); ring_bytes (shm); device,
    library, store, packed, packed_buffer_size_bytes, packed_num_buffers (nccl); device, packed,
    packed_buffer_size_bytes (ipc). Returns when every rank is connected."""
    return Trainer(**init_info)


def trainer_send_weights(trainer, iterator, packed=None, **options):
    """Sends an iterator of (name, tensor), between start_weight_update and finish_weight_update (or
    inside `with trainer.update(...)`). Names are those of the Hugging Face checkpoint."""
    return trainer.send_weights(iterator, packed=packed, **options)
