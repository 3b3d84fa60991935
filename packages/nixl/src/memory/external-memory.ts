import { KvError, type Memory } from "@kv/interface";
import type { NativeDeviceMemory } from "../addon/native.js";
import { RefCount } from "../ref-count.js";
import { requirePart } from "./host-memory.js";

/**
 * Registration details of memory that is registered by its address: a file, an object, or memory of
 * a device or of the caller.
 */
export interface ExternalMemory {
  /** Whether `register` asks the CUDA driver if the address belongs to the device. */
  readonly checkWithCuda: boolean;
  /** The name of an object in its store; empty for every other kind. */
  readonly key: string;
  /**
   * Memory of a GPU that the addon allocated: its registration keeps it, also when the agent's
   * thread is given up.
   */
  readonly kept: NativeDeviceMemory | undefined;
  /**
   * Marks the memory as registered until the returned function is called. Throws
   * `KV_MEMORY_INVALID` once the memory is closed.
   */
  hold(): () => void;
}

/** How external memory is described. */
export interface ExternalMemoryOptions
  extends Pick<Memory, "address" | "lengthBytes" | "deviceId"> {
  /** The kind of memory. */
  readonly memoryType: "DRAM" | "VRAM" | "FILE" | "OBJ";
  /** Names the memory in error messages, such as by its path. */
  readonly subject: string;
  /** As in `ExternalMemory`; false by default. */
  readonly checkWithCuda?: boolean | undefined;
  /** As in `ExternalMemory`. */
  readonly key?: string | undefined;
  /** As in `ExternalMemory`. */
  readonly kept?: NativeDeviceMemory | undefined;
  /** The bytes, where JavaScript can access them. */
  readonly bytes?: Uint8Array | undefined;
  /** Stays referenced until the memory is closed. */
  readonly owner?: object | undefined;
  /** Copies between the memory and buffers, where this process can make them. */
  readonly copies?: Pick<Memory, "gather" | "scatter"> | undefined;
  /** Called once when the memory is closed; when it throws, the memory stays open. */
  readonly onClose?: (() => void) | undefined;
}

const externals = new WeakMap<Memory, ExternalMemory>();

/** The registration details of memory that `externalMemory` created; undefined for other memory. */
export const externalMemoryOf = (memory: Memory): ExternalMemory | undefined =>
  externals.get(memory);

/**
 * A `Memory` that is registered by its address. Without `options.copies`, `gather` and `scatter`
 * reject with `KV_TRANSPORT_UNSUPPORTED`. Without `options.bytes` JavaScript cannot access it:
 * `bytes` is empty and `view` throws `KV_MEMORY_INVALID`. `close` throws `KV_MEMORY_IN_USE` while
 * it is registered.
 */
export function externalMemory(options: ExternalMemoryOptions): Memory & Disposable {
  const { memoryType, address, lengthBytes, deviceId, subject } = options;
  const { checkWithCuda = false, key = "", onClose } = options;
  const registrations = new RefCount();
  let closed = false;
  const held = { bytes: options.bytes, owner: options.owner };
  const unsupported = async (): Promise<never> => {
    throw new KvError("KV_TRANSPORT_UNSUPPORTED", `only transfers move the bytes of ${subject}`);
  };
  const close = () => {
    if (closed) return;
    if (registrations.count > 0) {
      throw new KvError(
        "KV_MEMORY_IN_USE",
        `${subject} has ${registrations.count} open registrations`,
        {
          hint: "close them before the memory",
        },
      );
    }
    onClose?.();
    closed = true;
    held.bytes = undefined;
    held.owner = undefined;
  };
  const memory: Memory & Disposable = Object.freeze({
    address,
    lengthBytes,
    memoryType,
    deviceId,
    get bytes() {
      return held.bytes ?? new Uint8Array(0);
    },
    view(offsetBytes: number, viewBytes: number) {
      if (closed) throw new KvError("KV_MEMORY_INVALID", `${subject} is closed`);
      if (held.bytes === undefined) {
        throw new KvError("KV_MEMORY_INVALID", `this process cannot address ${subject}`, {
          hint: "transfer its bytes to memory of allocate()",
        });
      }
      requirePart(offsetBytes, viewBytes, held.bytes.length);
      return held.bytes.subarray(offsetBytes, offsetBytes + viewBytes);
    },
    ...(options.copies ?? { gather: unsupported, scatter: unsupported }),
    close,
    [Symbol.dispose]: close,
  });
  externals.set(memory, {
    checkWithCuda,
    key,
    kept: options.kept,
    hold() {
      if (closed) throw new KvError("KV_MEMORY_INVALID", `${subject} is closed`);
      return registrations.hold();
    },
  });
  return memory;
}
