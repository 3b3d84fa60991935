import { KvError, type MemoryType } from "@kv/interface";

export interface AgentMetadata {
  readonly name: string;
  readonly host: string;
  /** A restarted agent of the same name is a different peer. */
  readonly incarnation: string;
  readonly memories: readonly DescribedMemory[];
}

export interface DescribedMemory {
  readonly address: number;
  readonly lengthBytes: number;
  readonly memoryType: MemoryType;
  readonly deviceId: number;
}

const MEMBERS = ["address", "lengthBytes", "memoryType", "deviceId"] as const;
/** "KVMM", then the encoding's version. */
const HEADER = Uint8Array.of(0x4b, 0x56, 0x4d, 0x4d, 1);
const CHECKSUM_LENGTH_BYTES = 4;
const MAX_LENGTH_BYTES = 16 * 1024 * 1024;
export const AGENT_NAME = /^[\x20-\x7e]{1,255}$/;

/** A header, JSON with the memories as rows, and a CRC-32 that detects damage. */
export function encodeMetadata(metadata: AgentMetadata): Uint8Array {
  const memories = metadata.memories.map((memory) => MEMBERS.map((member) => memory[member]));
  const body = new TextEncoder().encode(JSON.stringify({ ...metadata, memories }));
  const out = new Uint8Array(HEADER.length + body.length + CHECKSUM_LENGTH_BYTES);
  out.set(HEADER);
  out.set(body, HEADER.length);
  const end = out.length - CHECKSUM_LENGTH_BYTES;
  new DataView(out.buffer).setUint32(end, crc32(out.subarray(0, end)));
  return out;
}

/**
 *
 * @throws `KV_AGENT_METADATA_INVALID`, with the reason.
 */
export function decodeMetadata(bytes: Uint8Array): AgentMetadata {
  if (!(bytes instanceof Uint8Array)) throw invalid("it is not a Uint8Array");
  const end = bytes.length - CHECKSUM_LENGTH_BYTES;
  if (end < HEADER.length) throw invalid(`${bytes.length} bytes are too few`);
  if (bytes.length > MAX_LENGTH_BYTES)
    throw invalid(`${bytes.length} bytes are more than ${MAX_LENGTH_BYTES}`);
  HEADER.forEach((byte, index) => {
    if (bytes[index] !== byte)
      throw invalid("its header is not that of memory-transport metadata, version 1");
  });
  const stored = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength).getUint32(end);
  const computed = crc32(bytes.subarray(0, end));
  if (stored !== computed)
    throw invalid(`its checksum is ${stored}, that of its bytes is ${computed}`);
  let value: unknown;
  try {
    value = JSON.parse(
      new TextDecoder("utf-8", { fatal: true }).decode(bytes.subarray(HEADER.length, end)),
    );
  } catch (cause) {
    throw invalid("its body is not JSON", cause);
  }
  return check(value);
}

function check(value: unknown): AgentMetadata {
  if (typeof value !== "object" || value === null) throw invalid("its body is not an object");
  const { name, host, incarnation, memories } = value as Record<string, unknown>;
  if (typeof name !== "string" || !AGENT_NAME.test(name))
    throw invalid("its agent name is invalid");
  if (typeof host !== "string" || host.length === 0) throw invalid("it has no host");
  if (typeof incarnation !== "string" || incarnation.length === 0)
    throw invalid("it has no incarnation");
  if (!Array.isArray(memories)) throw invalid("it has no list of memories");
  return { name, host, incarnation, memories: memories.map(describedMemory) };
}

function describedMemory(row: unknown, index: number): DescribedMemory {
  if (!Array.isArray(row) || row.length !== 4)
    throw invalid(`memory ${index} is not a row of four`);
  const [address, lengthBytes, memoryType, deviceId] = row as unknown[];
  const whole = (number: unknown): number => {
    if (typeof number === "number" && Number.isSafeInteger(number) && number >= 0) return number;
    throw invalid(`memory ${index} has ${String(number)} in place of a non-negative integer`);
  };
  if (memoryType !== "DRAM" && memoryType !== "VRAM")
    throw invalid(`memory ${index} has an unknown memory type`);
  if (whole(whole(address) + whole(lengthBytes)) === 0) throw invalid(`memory ${index} is empty`);
  return {
    address: whole(address),
    lengthBytes: whole(lengthBytes),
    memoryType,
    deviceId: whole(deviceId),
  };
}

function invalid(reason: string, cause?: unknown): KvError {
  return new KvError("KV_AGENT_METADATA_INVALID", `invalid metadata of a peer's agent: ${reason}`, {
    cause,
  });
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value >>> 0;
});

function crc32(bytes: Uint8Array): number {
  let state = 0xffffffff;
  for (const byte of bytes) state = (state >>> 8) ^ (CRC_TABLE[(state ^ byte) & 0xff] as number);
  return (state ^ 0xffffffff) >>> 0;
}
