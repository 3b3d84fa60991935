import { KvError } from "@kv/interface";
import { loadNrtAddon, type NrtTensor, nrtLibraryPaths, withNrtLibrary } from "../libnrt.js";
import { deviceMemory, type NeuronDevice } from "./device.js";

/** Options of `nrtDevice`. */
export interface NrtDeviceOptions {
  /**
   * Path or loader's name of `libnrt.so`. @default `KV_NRT_LIBRARY`, else `libnrt.so.1`, else the
   * path of AWS's packages
   */
  readonly libraryPath?: string | undefined;
  /** The logical Neuron core that holds the tensors. @default 0 */
  readonly logicalCore?: number | undefined;
}

/**
 * Opens the Neuron runtime with libnrt 2's documented calls `nrt_tensor_allocate`,
 * `nrt_tensor_read` and `nrt_tensor_write`, in batch form where the library has it. Copies run on
 * libuv's thread pool. It has run only against a stand-in for libnrt, not on hardware.
 * @throws `KV_ADDON_NOT_FOUND`; `KV_STAGING_FAILED` with the runtime's status.
 */
export function nrtDevice(options: NrtDeviceOptions = {}): NeuronDevice & AsyncDisposable {
  const { libraryPath, logicalCore = 0 } = options;
  const addon = loadNrtAddon();
  const paths = libraryPath === undefined ? nrtLibraryPaths() : [libraryPath];
  const runtime = callRuntime("opening the Neuron runtime", () =>
    withNrtLibrary(paths, (path) => addon.open(path)),
  );
  const tensors = new Set<NrtTensor>();
  const copying = new Set<Promise<unknown>>();
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  let closed = false;

  async function copy(
    tensor: NrtTensor,
    write: boolean,
    runs: Float64Array,
    buffer: ArrayBuffer,
  ): Promise<void> {
    counts.copies += 1;
    try {
      const done = tensor.copy(write, runs, buffer);
      copying.add(done);
      await done.finally(() => copying.delete(done));
    } catch (error) {
      throw failed(
        write ? "writing to the Neuron device" : "reading from the Neuron device",
        error,
      );
    }
    if (write) counts.bytesWritten += buffer.byteLength;
    else counts.bytesRead += buffer.byteLength;
  }

  const device: NeuronDevice & AsyncDisposable = {
    maker: "libnrt",
    counts,
    allocate(lengthBytes) {
      if (closed) throw new KvError("KV_MEMORY_INVALID", "the Neuron device is closed");
      const name = `kv-${tensors.size}`;
      const tensor = callRuntime(
        `allocating ${lengthBytes} bytes`,
        () => new addon.Tensor(runtime, lengthBytes, logicalCore, name),
      );
      tensors.add(tensor);
      return deviceMemory(lengthBytes, logicalCore, {
        async read(runs, total) {
          const out = new ArrayBuffer(total);
          await copy(tensor, false, runs, out);
          return out;
        },
        write: (runs, bytes) => copy(tensor, true, runs, bytes),
        close() {
          tensors.delete(tensor);
          tensor.close();
        },
      });
    },
    async close() {
      if (closed) return;
      closed = true;
      await Promise.allSettled(copying);
      for (const tensor of tensors) tensor.close();
      tensors.clear();
      addon.close(runtime);
    },
    [Symbol.asyncDispose]: () => device.close(),
  };
  return device;
}

function callRuntime<T>(action: string, call: () => T): T {
  try {
    return call();
  } catch (error) {
    throw failed(action, error);
  }
}

function failed(action: string, error: unknown): KvError {
  if (KvError.is(error)) return error;
  const reason = error instanceof Error ? error.message : String(error);
  return new KvError("KV_STAGING_FAILED", `${action}: ${reason}`, {
    cause: error,
    hint: "run: npx --no-install kv-neuron doctor",
  });
}
