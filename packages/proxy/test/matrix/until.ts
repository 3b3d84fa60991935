/** Longer than any end takes. */
const LEVEL_MS = 12_000;

export async function until(isSo: () => boolean): Promise<void> {
  const endsAtMs = performance.now() + LEVEL_MS;
  while (!isSo() && performance.now() < endsAtMs)
    await new Promise((resolve) => setTimeout(resolve, 10));
}
