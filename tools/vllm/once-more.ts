/**
 * On two busy cores a process may not run at all for the five seconds that vLLM gives a handshake. A handshake that timed out, and nothing
 * else, is tried once more.
 */
export async function onceMoreAfterTimeout<T>(
  work: () => Promise<T>,
  timedOut: (error: unknown) => boolean,
): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (!timedOut(error)) throw error;
    process.stderr.write("a handshake timed out on a busy machine: once more\n");
    return work();
  }
}

/** Whether a vLLM server that was to shake hands with us has given up waiting since now. */
export function handshakeTimeouts(server: { log(): string }): () => boolean {
  const said = server.log().length;
  return () => server.log().slice(said).includes("zmq.error.Again");
}
