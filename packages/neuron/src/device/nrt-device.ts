import { KvError, type Memory } from "@kv/interface";
import { loadNrtAddon, type NrtTensor, nrtLibraryPaths, withNrtLibrary } from "../libnrt.js";
import { checkRuns, checkSource, type NeuronDevice, notAddressable } from "./device.js";

export interface NrtDeviceOptions {
  /** Path of `libnrt.so`, or its name for the loader to find; `KV_NRT_LIBRARY`, else `libnrt.so.1`, else where AWS's packages put it. */
  readonly libraryPath?: string;
  /** On which logical Neuron core tensors are allocated; 0 by default. */
  readonly logicalCore?: number;
}

/**
 * Memory of a Neuron device by the runtime's tensor calls (`nrt_tensor_allocate`, `nrt_tensor_read`, `nrt_tensor_write`, and the batch forms where
 * the library has them), as AWS documents them for libnrt 2. Untested on hardware: tried against a stand-in only. Copies run on libuv's
 * pool. Errors: `KV_STAGING_FAILED` with what the runtime answered.
 */
export function nrtDevice(options: NrtDeviceOptions = {}): NeuronDevice {
  const { libraryPath, logicalCore = 0 } = options;
  const addon = loadNrtAddon();
  const paths = libraryPath === undefined ? nrtLibraryPaths() : [libraryPath];
  const runtime = asked("opening the Neuron runtime", () =>
    withNrtLibrary(paths, (path) => addon.open(path)),
  );
  const tensors = new Set<NrtTensor>();
  const copying = new Set<Promise<unknown>>();
  const counts = { copies: 0, bytesRead: 0, bytesWritten: 0 };
  let closed = false;
  let nextAddress = 2 ** 40;

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
      throw failed(write ? "writing to the Neuron device" : "reading from the Neuron device", error);
    }
    if (write) counts.bytesWritten += buffer.byteLength;
    else counts.bytesRead += buffer.byteLength;
  }

  return {
    maker: "libnrt",
    counts,
    allocate(lengthBytes) {
      if (closed) throw new KvError("KV_MEMORY_INVALID", "the Neuron device is closed");
      const name = `kv-${tensors.size}`;
      const tensor = asked(
        `allocating ${lengthBytes} bytes`,
        () => new addon.Tensor(runtime, lengthBytes, logicalCore, name),
      );
      tensors.add(tensor);
      // Not the device's: nothing of it is registered, and addresses tell memories apart.
      const address = nextAddress;
      nextAddress += Math.ceil(lengthBytes / 4096) * 4096 + 4096;
      const memory: Memory = {
        address,
        lengthBytes,
        memoryType: "VRAM",
        deviceId: logicalCore,
        get bytes(): Uint8Array {
          throw notAddressable();
        },
        async gather(runs) {
          const out = new ArrayBuffer(checkRuns(runs, lengthBytes));
          await copy(tensor, false, runs, out);
          return out;
        },
        async scatter(runs, source) {
          checkSource(checkRuns(runs, lengthBytes), source);
          await copy(tensor, true, runs, source);
        },
        close() {
          tensors.delete(tensor);
          tensor.close();
        },
      };
      return memory;
    },
    async close() {
      if (closed) return;
      closed = true;
      await Promise.allSettled(copying);
      for (const tensor of tensors) tensor.close();
      tensors.clear();
      addon.close(runtime);
    },
  };
}

function asked<T>(what: string, call: () => T): T {
  try {
    return call();
  } catch (error) {
    throw failed(what, error);
  }
}

function failed(what: string, error: unknown): KvError {
  if (KvError.is(error)) return error;
  const reason = error instanceof Error ? error.message : String(error);
  return new KvError("KV_STAGING_FAILED", `${what}: ${reason}`, {
    cause: error,
    hint: "run: npx --no-install kv-neuron doctor",
  });
}
