import { joined } from "./body-queue.js";
import type { UpstreamAnswer } from "./upstream.js";

/** The begin of an answer, and whether that is all of it. */
export interface HeldBody {
  readonly bytes: Buffer;
  readonly complete: boolean;
}

/** A body whose end has come already, within the limit: most short ones. It saves a wait. */
export function heldAlready(body: UpstreamAnswer["body"], limitBytes: number): HeldBody | undefined {
  const bytes = body.whole?.(limitBytes);
  return bytes === undefined ? undefined : { bytes, complete: true };
}

/** Reads until the end, until `enough` says so, or until more than `limitBytes` are there; the rest stays to be read. */
export async function hold(
  body: UpstreamAnswer["body"],
  limitBytes: number,
  enough?: (bytes: Buffer) => boolean,
): Promise<HeldBody> {
  const chunks: Uint8Array[] = [];
  let lengthBytes = 0;
  for (;;) {
    const { done, value } = await body.next();
    if (done === true) return { bytes: joined(chunks), complete: true };
    chunks.push(value);
    lengthBytes += value.byteLength;
    if (body.finished?.() === true) return { bytes: joined(chunks), complete: lengthBytes <= limitBytes };
    if (lengthBytes > limitBytes) return { bytes: joined(chunks), complete: false };
    const begin = lengthBytes > 0 && enough !== undefined ? joined(chunks) : undefined;
    if (begin !== undefined && enough?.(begin) === true) return { bytes: begin, complete: false };
  }
}
