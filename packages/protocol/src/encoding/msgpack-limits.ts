import { isUtf8 } from "node:buffer";
import { KvError } from "@kv/interface";

/** Limits of a peer's message. A message beyond them is refused before memory is allocated for it. */
export interface MsgpackLimits {
  /** Length of the whole message in bytes. */
  readonly maxBytes: number;
  /** Levels of nested lists and maps. */
  readonly maxDepth: number;
  /** Elements of one list, or entries of one map. */
  readonly maxItems: number;
  /** Values in the whole message, keys included: one byte of it can announce a list of many. @default 2_000_000 */
  readonly maxValues?: number | undefined;
}

export const DEFAULT_MAX_VALUES = 2_000_000;

/**
 * Walks the headers of a message without building values, and so checks size, depth and form before it is decoded. A message must be
 * one value up to its last byte, its map keys must be strings, its strings UTF-8, and it must hold no extension types.
 * Errors: `KV_WIRE_LIMIT_EXCEEDED`, `KV_WIRE_MALFORMED` with the byte offset.
 */
export function checkMsgpackHeaders(bytes: Uint8Array, what: string, limits: MsgpackLimits): void {
  if (bytes.byteLength > limits.maxBytes) {
    throw tooMuch(what, `${bytes.byteLength} bytes`, limits.maxBytes);
  }
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  // Per level of nesting: the values still to come, and whether the level is a map (keys and values alternate). The message is one value.
  const pending: number[] = [1];
  const isMap: boolean[] = [false];
  const { maxItems, maxDepth, maxValues = DEFAULT_MAX_VALUES } = limits;
  let values = 0;
  let at = 0;

  const malformed = (reason: string) => new KvError("KV_WIRE_MALFORMED", `${what}: ${reason} at byte ${at}`);
  const skip = (size: number) => {
    if (at + size > bytes.byteLength) throw malformed("truncated");
    at += size;
  };
  const length = (size: number): number => {
    skip(size);
    if (size === 1) return view.getUint8(at - 1);
    return size === 2 ? view.getUint16(at - 2) : view.getUint32(at - 4);
  };
  const text = (size: number) => {
    skip(size);
    if (!isUtf8(bytes.subarray(at - size, at))) throw malformed("a string that is not UTF-8 ends");
  };
  const enter = (items: number, map: boolean) => {
    if (items > maxItems) throw tooMuch(what, `${items} items in one ${map ? "map" : "list"}`, maxItems);
    const inside = map ? items * 2 : items;
    values += inside;
    if (values > maxValues) throw tooMuch(what, `${values} values`, maxValues);
    if (pending.length > maxDepth) throw tooMuch(what, `${pending.length} levels of nesting`, maxDepth);
    pending.push(inside);
    isMap.push(map);
  };

  while (pending.length > 0) {
    const level = pending.length - 1;
    const left = pending[level] ?? 0;
    if (left === 0) {
      pending.pop();
      isMap.pop();
      continue;
    }
    pending[level] = left - 1;
    const head = length(1);
    if (isMap[level] === true && left % 2 === 0 && !isText(head))
      throw malformed("a map key that is not a string");
    if (isText(head)) text(head <= 0xbf ? head & 0x1f : length(2 ** (head - 0xd9)));
    else if (head <= 0x7f || head >= 0xe0 || head === 0xc0 || head === 0xc2 || head === 0xc3) continue;
    else if (head <= 0x8f) enter(head & 0x0f, true);
    else if (head <= 0x9f) enter(head & 0x0f, false);
    else if (head >= 0xc4 && head <= 0xc6) skip(length(2 ** (head - 0xc4)));
    else if (head === 0xca || head === 0xcb) skip(head === 0xca ? 4 : 8);
    else if (head >= 0xcc && head <= 0xcf) skip(2 ** (head - 0xcc));
    else if (head >= 0xd0 && head <= 0xd3) skip(2 ** (head - 0xd0));
    else if (head === 0xdc || head === 0xdd) enter(length(head === 0xdc ? 2 : 4), false);
    else if (head === 0xde || head === 0xdf) enter(length(head === 0xde ? 2 : 4), true);
    else throw malformed(`type byte 0x${head.toString(16)} is not accepted`);
  }
  if (at !== bytes.byteLength) throw malformed(`${bytes.byteLength - at} bytes after the value`);
}

const isText = (head: number) => (head >= 0xa0 && head <= 0xbf) || (head >= 0xd9 && head <= 0xdb);

function tooMuch(what: string, found: string, limit: number): KvError {
  return new KvError("KV_WIRE_LIMIT_EXCEEDED", `${what}: ${found}; the limit is ${limit}`, {
    details: { limit },
  });
}
