import { KvError, type Memory } from "@kv/interface";
import { requireObject, shown } from "../validate.js";
import { foreignMemory } from "./external-memory.js";

export interface DeviceMemoryOptions {
  /** Where it begins: a pointer of the device's runtime that is good in this process. Below 2^53. */
  readonly address: bigint | number;
  readonly lengthBytes: number;
  /** The device's ordinal, as this process counts its devices: with `CUDA_VISIBLE_DEVICES=3` that one is 0. */
  readonly deviceId: number;
  /**
   * `"cuda"`, the default: `register` asks the CUDA driver of this process whether all of it is memory of that device, and refuses what is
   * not (`KV_MEMORY_INVALID`). `"none"`: memory of another runtime, for which the caller vouches; NIXL may end the process over an address
   * that is no device's.
   */
  readonly check?: "cuda" | "none";
}

/**
 * Memory of a device (`VRAM`) that somebody else has allocated, as memory that an agent can register: by its address, its length and its
 * device, which are what a peer names it by too. It stays its owner's, who frees it after the registration and this have been closed.
 * It has no `bytes`, and `gather` and `scatter` are `KV_TRANSPORT_UNSUPPORTED`. Errors: `KV_MEMORY_INVALID`.
 */
export function deviceMemory(options: DeviceMemoryOptions): Memory {
  requireObject(options, "KV_MEMORY_INVALID", "what is known of device memory");
  const { lengthBytes, deviceId, check = "cuda" } = options;
  const address = exact("address", options.address);
  if (address === 0) throw invalid("address is 0, a null pointer");
  if (!Number.isSafeInteger(lengthBytes) || lengthBytes <= 0) {
    throw invalid(`lengthBytes is ${shown(lengthBytes)}, not a positive integer`);
  }
  if (!Number.isSafeInteger(address + lengthBytes)) {
    throw invalid(`${lengthBytes} bytes at address ${address} end beyond 2^53`);
  }
  if (!Number.isSafeInteger(deviceId) || deviceId < 0) {
    throw invalid(`deviceId is ${shown(deviceId)}, not an integer from 0 on`);
  }
  if (check !== "cuda" && check !== "none") {
    throw invalid(`check is ${shown(check)}, not "cuda" or "none"`);
  }
  return foreignMemory({
    memoryType: "VRAM",
    address,
    lengthBytes,
    deviceId,
    subject: `${lengthBytes} bytes at 0x${address.toString(16)} of device ${deviceId}`,
    check: check === "cuda",
  });
}

function exact(name: string, value: bigint | number): number {
  const number = typeof value === "bigint" ? Number(value) : value;
  if (!Number.isSafeInteger(number) || number < 0) {
    throw invalid(`${name} is ${shown(value)}, not an integer from 0 to 2^53 - 1`);
  }
  return number;
}

const invalid = (what: string): KvError =>
  new KvError("KV_MEMORY_INVALID", `device memory cannot be described: ${what}`);
