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
  enough: (bytes: Buffer) => boolean = () => false,
): Promise<HeldBody> {
  const chunks: Uint8Array[] = [];
  let lengthBytes = 0;
  for (;;) {
    const { done, value } = await body.next();
    if (done === true) return { bytes: Buffer.concat(chunks), complete: true };
    chunks.push(value);
    lengthBytes += value.byteLength;
    if (lengthBytes > limitBytes) return { bytes: Buffer.concat(chunks), complete: false };
    if (lengthBytes > 0 && enough(Buffer.concat(chunks)))
      return { bytes: Buffer.concat(chunks), complete: false };
  }
}
