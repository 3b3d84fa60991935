const ATTEMPTS = 3;

/**
 * Runs `work`, and retries it after a handshake timeout, but after no other error. On two busy
 * cores a process may not run for the five seconds that vLLM allows for a handshake.
 */
export async function retryAfterTimeout<T>(
  work: () => Promise<T>,
  timedOut: (error: unknown) => boolean,
): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await work();
    } catch (error) {
      if (attempt === ATTEMPTS || !timedOut(error)) throw error;
      process.stderr.write("a handshake timed out on a busy machine: retrying\n");
    }
  }
}

/**
 * Returns a function that returns true when a handshake of this vLLM server has timed out since the
 * last call.
 */
export function handshakeTimedOut(server: { log(): string }): () => boolean {
  let readLength = server.log().length;
  return () => {
    const log = server.log();
    const timedOut = log.slice(readLength).includes("zmq.error.Again");
    readLength = log.length;
    return timedOut;
  };
}
