/** The same bytes as ZMQ takes them; nothing is copied. */
export function asBuffer(frame: Uint8Array): Buffer {
  return Buffer.from(frame.buffer, frame.byteOffset, frame.byteLength);
}

export function reasonOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
