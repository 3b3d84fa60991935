/** The error of a timeout contains `what`. */
export async function until(
  holds: () => Promise<boolean> | boolean,
  what: string,
  { timeoutMs = 30_000, everyMs = 100 }: { timeoutMs?: number; everyMs?: number } = {},
): Promise<void> {
  const end = Date.now() + timeoutMs;
  while (!(await holds())) {
    if (Date.now() > end) throw new Error(`not within ${timeoutMs} ms: ${what}`);
    await sleep(everyMs);
  }
}

export const sleep = (ms: number) => new Promise<void>((resolve) => setTimeout(resolve, ms));

const ATTEMPTS = 3;

/**
 * After no other error. On two busy cores a process may not run for the five seconds that vLLM
 * allows.
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

/** Since the last call. */
export function handshakeTimedOut(...servers: readonly { log(): string }[]): () => boolean {
  const ends = servers.map((server) => server.log().length);
  return () => {
    const timedOut = servers.map((server, at) => {
      const log = server.log();
      const news = log.slice(ends[at]);
      ends[at] = log.length;
      return news.includes("zmq.error.Again");
    });
    return timedOut.includes(true);
  };
}
