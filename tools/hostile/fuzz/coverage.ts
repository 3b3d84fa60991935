import { Session } from "node:inspector/promises";

/** Which blocks of the packages' code run, as V8 counts them. */
export class Coverage {
  readonly #session = new Session();
  readonly #seen = new Set<string>();

  async start(): Promise<void> {
    this.#session.connect();
    await this.#session.post("Profiler.enable");
    const precise = { callCount: true, detailed: true };
    await this.#session.post("Profiler.startPreciseCoverage", precise);
  }

  /** The blocks that ran since the last call and never before `add` named them. */
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

  /** From now on these blocks are not new. */
  add(blocks: Iterable<string>): void {
    for (const block of blocks) this.#seen.add(block);
  }

  get size(): number {
    return this.#seen.size;
  }
}
