const ATTEMPTS = 3;

/**
 * On two busy cores a process may not run at all for the five seconds that vLLM gives a handshake. A handshake that timed out, and nothing
 * else, is tried again.
 */
export async function onceMoreAfterTimeout<T>(
  work: () => Promise<T>,
  timedOut: (error: unknown) => boolean,
): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      if (attempt === ATTEMPTS || !timedOut(error)) throw error;
      process.stderr.write("a handshake timed out on a busy machine: once more\n");
    }
  }
}

/** Whether a vLLM server that was to shake hands with us has given up waiting since this was last asked. */
export function handshakeTimeouts(server: { log(): string }): () => boolean {
  let said = server.log().length;
  return () => {
    const log = server.log();
    const timedOut = log.slice(said).includes("zmq.error.Again");
    said = log.length;
    return timedOut;
  };
}
