const ATTEMPTS = 3;

/**
 * On two busy cores a process may not run for the five seconds that vLLM allows for a handshake. This tries again after such a timeout, and after
 * no other error.
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

/** Returns a function that tells whether a handshake of this vLLM server with us has timed out since its last call. */
export function handshakeTimeouts(server: { log(): string }): () => boolean {
  let said = server.log().length;
  return () => {
    const log = server.log();
    const timedOut = log.slice(said).includes("zmq.error.Again");
    said = log.length;
    return timedOut;
  };
}
