import { type BodyQueue, concatChunks } from "./body-queue.js";

/** The first bytes of an answer. */
export interface LimitedBody {
  readonly bytes: Buffer;
  /** Whether `bytes` is all of the body. */
  readonly complete: boolean;
}

/** A body that has ended already and is within the limit, as most short ones; else undefined. It saves a wait. */
export function readBuffered(body: BodyQueue, limitBytes: number): LimitedBody | undefined {
  const bytes = body.whole(limitBytes);
  return bytes === undefined ? undefined : { bytes, complete: true };
}

/**
 * Reads a body until its end, until `enough` is true of the bytes so far, or until there are more than `limitBytes`. The rest stays unread.
 * Errors: those of the body.
 */
export async function readLimited(
  body: BodyQueue,
  limitBytes: number,
  enough?: (bytes: Buffer) => boolean,
): Promise<LimitedBody> {
  const chunks: Uint8Array[] = [];
  let lengthBytes = 0;
  for (;;) {
    const { done, value } = await body.next();
    if (done === true) return { bytes: concatChunks(chunks), complete: true };
    chunks.push(value);
    lengthBytes += value.byteLength;
    if (body.finished()) return { bytes: concatChunks(chunks), complete: lengthBytes <= limitBytes };
    if (lengthBytes > limitBytes) return { bytes: concatChunks(chunks), complete: false };
    if (lengthBytes === 0 || enough === undefined) continue;
    const bytes = concatChunks(chunks);
    if (enough(bytes)) return { bytes, complete: false };
  }
}
