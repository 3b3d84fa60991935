import { Session } from "node:inspector";

interface ScriptCoverage {
  readonly url: string;
  readonly functions: readonly {
    readonly ranges: readonly {
      readonly startOffset: number;
      readonly endOffset: number;
      readonly count: number;
    }[];
  }[];
}

/** Which blocks of the packages' code run, as V8 counts them. */
export class Coverage {
  readonly #session = new Session();
  readonly #seen = new Set<string>();

  constructor() {
    this.#session.connect();
    this.#post("Profiler.enable");
    this.#post("Profiler.startPreciseCoverage", { callCount: true, detailed: true });
  }

  /** The blocks that ran since the last call and never before `add` named them. */
  takeNew(): Set<string> {
    const found = new Set<string>();
    const { result } = this.#post("Profiler.takePreciseCoverage") as { result: ScriptCoverage[] };
    for (const { url, functions } of result) {
      if (!/\/(packages|apps)\/[^/]+\/src\/|msgpack/.test(url)) continue;
      for (const { ranges } of functions) {
        for (const { startOffset, endOffset, count } of ranges) {
          const key = `${url}:${startOffset}:${endOffset}`;
          if (count > 0 && !this.#seen.has(key)) found.add(key);
        }
      }
    }
    return found;
  }

  /** From now on these blocks are not new. */
  add(blocks: Iterable<string>): void {
    for (const block of blocks) this.#seen.add(block);
  }

  /** Blocks that have run. */
  get size(): number {
    return this.#seen.size;
  }

  #post(method: string, parameters: object = {}): unknown {
    let answer: unknown;
    // The session of the own thread answers before `post` returns.
    this.#session.post(method, parameters, (error, result) => {
      if (error !== null) throw error;
      answer = result;
    });
    return answer;
  }
}
