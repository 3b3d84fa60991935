import { KvError, type Memory } from "@kv/interface";
import type { NativeAddon } from "../addon/native.js";
import { callNative } from "../addon/native-errors.js";
import { formatValue, requireOptions } from "../validate.js";
import { copiesOf } from "./host-memory.js";
import { addressOf, registrableMemory } from "./registrable-memory.js";

/** Where memory of a device lies. */
export interface DeviceMemoryOptions {
  /** A pointer of the device's runtime that is valid in this process; above 0, below 2^53. */
  readonly address: bigint | number;
  /** At least 1. */
  readonly lengthBytes: number;
  /**
   * The device's ordinal as this process counts: under `CUDA_VISIBLE_DEVICES=3` that device is 0.
   */
  readonly deviceId: number;
  /**
   * `"cuda"`: `register` asks the CUDA driver, and rejects with `KV_MEMORY_INVALID` unless the
   * whole range is memory of that device. `"none"` checks nothing, for other runtimes (ROCm,
   * Neuron); NIXL may end the process when the address belongs to no device. @default "cuda"
   */
  readonly check?: "cuda" | "none" | undefined;
  /**
   * How the device's runtime copies between this memory and buffers. A connector whose D has its
   * cache here zeroes with `scatter` what a transfer has not covered. @default `gather` and
   * `scatter` reject with `KV_TRANSPORT_UNSUPPORTED`
   */
  readonly copies?: Pick<Memory, "gather" | "scatter"> | undefined;
}

/**
 * Describes memory of a device (`VRAM`) that another library allocated. Free it only after the
 * registration and this handle are closed. It has no `bytes`. Throws `KV_MEMORY_INVALID`; `close`
 * throws `KV_MEMORY_IN_USE` while it is registered.
 */
export function deviceMemory(options: DeviceMemoryOptions): Memory & Disposable {
  requireOptions(options, "KV_MEMORY_INVALID", "the description of device memory", [
    "address",
    "lengthBytes",
    "deviceId",
    "check",
    "copies",
  ]);
  const { lengthBytes, deviceId, check = "cuda" } = options;
  const address = addressOf(options, invalid);
  if (!Number.isSafeInteger(deviceId) || deviceId < 0) {
    throw invalid(`deviceId is ${formatValue(deviceId)}, not an integer from 0 on`);
  }
  if (check !== "cuda" && check !== "none") {
    throw invalid(`check is ${formatValue(check)}, not "cuda" or "none"`);
  }
  return registrableMemory({
    memoryType: "VRAM",
    address,
    lengthBytes,
    deviceId,
    subject: `${lengthBytes} bytes at 0x${address.toString(16)} of device ${deviceId}`,
    checkWithCuda: check === "cuda",
    copies: options.copies,
  });
}

/** CUDA's ordinals have 32 bits. */
const MAX_ORDINAL = 2 ** 31 - 1;

/**
 * The memory is zeroed. Throws `KV_TRANSPORT_UNSUPPORTED` without a CUDA driver or such a GPU, and
 * `KV_MEMORY_INVALID` where the driver refuses.
 */
export function allocateDeviceMemory(
  addon: NativeAddon,
  lengthBytes: number,
  deviceId: number,
): Memory & Disposable {
  if (
    !Number.isSafeInteger(lengthBytes) ||
    lengthBytes < 1 ||
    !Number.isInteger(deviceId) ||
    deviceId < 0 ||
    deviceId > MAX_ORDINAL
  ) {
    throw new KvError(
      "KV_MEMORY_INVALID",
      `cannot allocate ${formatValue(lengthBytes)} bytes of device ${formatValue(deviceId)}: the length is a positive integer, and devices count from 0`,
    );
  }
  const native = callNative(() => new addon.Memory(lengthBytes, false, deviceId));
  return registrableMemory({
    memoryType: "VRAM",
    address: callNative(() => native.address),
    lengthBytes,
    deviceId,
    subject: `${lengthBytes} bytes of device ${deviceId}`,
    checkWithCuda: true,
    kept: native,
    copies: copiesOf(native),
    onClose: () => callNative(() => native.close(true)),
  });
}

const invalid = (why: string): KvError =>
  new KvError("KV_MEMORY_INVALID", `the description of device memory is wrong: ${why}`);
