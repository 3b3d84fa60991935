/**
 * Polls until `holds` returns true, for a state that a peer does not report. After the timeout it
 * throws an error that contains `what`.
 */
export async function until(
  holds: () => Promise<boolean> | boolean,
  what: string,
  { timeoutMs = 30_000, everyMs = 100 }: { timeoutMs?: number; everyMs?: number } = {},
): Promise<void> {
  const end = Date.now() + timeoutMs;
  while (!(await holds())) {
    if (Date.now() > end) throw new Error(`not within ${timeoutMs} ms: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, everyMs));
  }
}
