import type { UpstreamAnswer } from "./upstream.js";

/** The begin of an answer, and whether that is all of it. */
export interface HeldBody {
  readonly bytes: Buffer;
  readonly complete: boolean;
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

/** Most answers come in one piece, which needs no copy. */
function joined(chunks: readonly Uint8Array[]): Buffer {
  const [first] = chunks;
  return chunks.length === 1 && Buffer.isBuffer(first) ? first : Buffer.concat(chunks);
}
