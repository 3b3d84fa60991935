import { KvError, type Memory } from "@kv/interface";

/** Memory that the addon does not own, and whose bytes JavaScript cannot touch: a file, an object, memory of a device. */
export interface ForeignMemory {
  /** At registration CUDA's driver is asked whether it is memory of its device. */
  readonly check: boolean;
  /** An object's name in its store; empty for all else. */
  readonly key: string;
  /** Somebody registers it; the answered function says that it is over. Errors: `KV_MEMORY_INVALID` once it is closed. */
  hold(): () => void;
}

export interface ForeignMemoryOptions extends Pick<Memory, "address" | "lengthBytes" | "deviceId"> {
  readonly memoryType: "VRAM" | "FILE" | "OBJ";
  /** For errors, such as a path. */
  readonly subject: string;
  readonly check: boolean;
  readonly key?: string;
  onClose?(): void;
}

const foreign = new WeakMap<Memory, ForeignMemory>();

/** What `foreignMemory` made; undefined for memory of another kind. */
export const foreignOf = (memory: Memory): ForeignMemory | undefined => foreign.get(memory);

/** A handle that cannot be closed while it is registered. */
export function foreignMemory(options: ForeignMemoryOptions): Memory {
  const { memoryType, address, lengthBytes, deviceId, subject, check, key = "", onClose } = options;
  let holders = 0;
  let closed = false;
  const unsupported = async (): Promise<never> => {
    throw new KvError("KV_TRANSPORT_UNSUPPORTED", `only transfers move the bytes of ${subject}`);
  };
  const memory: Memory = Object.freeze({
    address,
    lengthBytes,
    memoryType,
    deviceId,
    bytes: new Uint8Array(0),
    gather: unsupported,
    scatter: unsupported,
    close() {
      if (closed) return;
      if (holders > 0) {
        throw new KvError("KV_MEMORY_IN_USE", `${holders} registrations name ${subject}`, {
          hint: "close them before the memory",
        });
      }
      closed = true;
      onClose?.();
    },
  });
  foreign.set(memory, {
    check,
    key,
    hold() {
      if (closed) throw new KvError("KV_MEMORY_INVALID", `${subject} is closed`);
      holders++;
      let over = false;
      return () => {
        if (over) return;
        over = true;
        holders--;
      };
    },
  });
  return memory;
}
