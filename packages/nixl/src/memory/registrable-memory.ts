import { KvError, type Memory } from "@kv/interface";
import type { NativeMemory } from "../addon/native.js";
import { RefCount } from "../ref-count.js";
import { formatValue } from "../validate.js";

export interface Registrable {
  /** `register` asks the CUDA driver whether the address belongs to the device. */
  readonly checkWithCuda: boolean;
  /** Empty except for an object. */
  readonly key: string;
  /** Its registration keeps the addon's memory, even when the agent's thread is given up. */
  readonly kept: NativeMemory | undefined;
  /**
   * The returned function ends the registration. Throws `KV_MEMORY_INVALID` once the memory is
   * closed.
   */
  hold(): () => void;
}

export interface RegistrableOptions
  extends Pick<Memory, "address" | "lengthBytes" | "deviceId" | "memoryType"> {
  /** Names the memory in error messages, such as by its path. */
  readonly subject: string;
  readonly checkWithCuda?: boolean | undefined;
  readonly key?: string | undefined;
  readonly kept?: NativeMemory | undefined;
  /** `all` works also on closed memory. */
  readonly views?: { all(): Uint8Array; part(offset: number, length: number): Uint8Array };
  /** Stays referenced until the memory is closed. */
  readonly owner?: object | undefined;
  readonly copies?: Pick<Memory, "gather" | "scatter"> | undefined;
  /** Called once on `close`; when it throws, the memory stays open. */
  readonly onClose?: (() => void) | undefined;
}

const registrables = new WeakMap<Memory, Registrable>();

/** Throws `KV_MEMORY_INVALID` for memory of another transport or another copy of this package. */
export function registrableOf(memory: Memory): Registrable {
  const registrable = registrables.get(memory);
  if (registrable !== undefined) return registrable;
  throw new KvError("KV_MEMORY_INVALID", "this memory was not allocated by @kv/nixl", {
    hint: "allocate it with this transport's allocate()",
  });
}

/**
 * Without `copies`, `gather` and `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`. Without `views`,
 * `bytes` is empty and `view` throws `KV_MEMORY_INVALID`. `close` throws `KV_MEMORY_IN_USE` while
 * it is registered.
 */
export function registrableMemory(options: RegistrableOptions): Memory & Disposable {
  const { memoryType, address, lengthBytes, deviceId, subject } = options;
  const { checkWithCuda = false, key = "", kept, copies, onClose } = options;
  const registrations = new RefCount();
  let closed = false;
  let { views, owner: _owner } = options;
  const unsupported = async (): Promise<never> => {
    throw new KvError("KV_TRANSPORT_UNSUPPORTED", `only transfers move the bytes of ${subject}`);
  };
  const requireOpen = () => {
    if (closed) throw new KvError("KV_MEMORY_INVALID", `${subject} is closed`);
  };
  const close = () => {
    if (closed) return;
    if (registrations.count > 0) {
      const message = `${subject} has ${registrations.count} open registrations`;
      throw new KvError("KV_MEMORY_IN_USE", message, { hint: "close them before the memory" });
    }
    onClose?.();
    closed = true;
    views = undefined;
    _owner = undefined;
  };
  const memory: Memory & Disposable = Object.freeze({
    address,
    lengthBytes,
    memoryType,
    deviceId,
    get bytes() {
      return views?.all() ?? new Uint8Array(0);
    },
    view(offsetBytes: number, viewBytes: number) {
      requireOpen();
      if (views === undefined) {
        throw new KvError("KV_MEMORY_INVALID", `this process cannot address ${subject}`, {
          hint: "transfer its bytes to memory of allocate()",
        });
      }
      requirePart(offsetBytes, viewBytes, lengthBytes);
      return views.part(offsetBytes, viewBytes);
    },
    ...(copies ?? { gather: unsupported, scatter: unsupported }),
    close,
    [Symbol.dispose]: close,
  });
  registrables.set(memory, {
    checkWithCuda,
    key,
    kept,
    hold() {
      requireOpen();
      return registrations.hold();
    },
  });
  return memory;
}

/** Throws `KV_MEMORY_INVALID` for a view beyond the memory. */
function requirePart(offsetBytes: number, lengthBytes: number, memoryBytes: number): void {
  const areNumbers = [offsetBytes, lengthBytes].every(
    (value) => Number.isSafeInteger(value) && value >= 0,
  );
  if (areNumbers && offsetBytes + lengthBytes <= memoryBytes) return;
  throw new KvError(
    "KV_MEMORY_INVALID",
    `a view of ${formatValue(lengthBytes)} bytes from ${formatValue(offsetBytes)} on does not lie in a memory of ${memoryBytes} bytes`,
  );
}

/** The address of a caller's range. Throws `invalid` unless the whole range lies below 2^53. */
export function addressOf(
  range: { readonly address: bigint | number; readonly lengthBytes: number },
  invalid: (why: string) => KvError,
): number {
  const { lengthBytes } = range;
  const address = typeof range.address === "bigint" ? Number(range.address) : range.address;
  if (address === 0) throw invalid("address is 0, a null pointer");
  if (!Number.isSafeInteger(address) || address < 0) {
    throw invalid(`address is ${formatValue(range.address)}, not an integer from 1 to 2^53 - 1`);
  }
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw invalid(`lengthBytes is ${formatValue(lengthBytes)}, not a positive integer`);
  }
  if (!Number.isSafeInteger(address + lengthBytes)) {
    throw invalid(`${lengthBytes} bytes at address ${address} end beyond 2^53`);
  }
  return address;
}
