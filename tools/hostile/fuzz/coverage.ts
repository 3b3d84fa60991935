import { Session } from "node:inspector/promises";

/** As V8 counts blocks of code. */
export class Coverage {
  readonly #session = new Session();
  readonly #seen = new Set<string>();

  async start(): Promise<void> {
    this.#session.connect();
    await this.#session.post("Profiler.enable");
    const precise = { callCount: true, detailed: true };
    await this.#session.post("Profiler.startPreciseCoverage", precise);
  }

  /** Of those that `add` has never named. */
  async takeNew(): Promise<Set<string>> {
    const found = new Set<string>();
    const { result } = await this.#session.post("Profiler.takePreciseCoverage");
    for (const { url, functions } of result) {
      if (!/\/(packages|apps)\/[^/]+\/src\/|msgpack/.test(url)) continue;
      for (const { startOffset, endOffset, count } of functions.flatMap(({ ranges }) => ranges)) {
        const key = `${url}:${startOffset}:${endOffset}`;
        if (count > 0 && !this.#seen.has(key)) found.add(key);
      }
    }
    return found;
  }

  add(blocks: Iterable<string>): void {
    for (const block of blocks) this.#seen.add(block);
  }

  get size(): number {
    return this.#seen.size;
  }
}
