import { StringDecoder } from "node:string_decoder";
import { KvError } from "@kv/interface";

/** Cuts a stream of server-sent events into the data of each. Comments and other fields are dropped. */
export interface EventReader {
  /** Errors: `KV_PROXY_UPSTREAM_FAILED` for an event above the limit. */
  push(bytes: Uint8Array): string[];
}

export function createEventReader(limitBytes: number): EventReader {
  const decoder = new StringDecoder("utf8");
  let pending = "";
  return {
    push(bytes) {
      pending += decoder.write(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength));
      const events = pending.split(/\r?\n\r?\n/);
      pending = events.pop() ?? "";
      if (pending.length > limitBytes)
        throw new KvError("KV_PROXY_UPSTREAM_FAILED", `an event is longer than ${limitBytes} bytes`);
      return events.map(dataOf).filter((data) => data !== "");
    },
  };
}

function dataOf(event: string): string {
  return event
    .split(/\r?\n/)
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(line.startsWith("data: ") ? 6 : 5))
    .join("\n");
}
