import type { Row } from "./report.js";

/** What the command line asks of a benchmark. */
export class Run {
  readonly only: readonly string[] | undefined;
  /** Fewer rounds and sizes: shows that it runs. */
  readonly short: boolean;
  readonly record: boolean;

  constructor({
    only,
    short = false,
    record = false,
  }: { only?: string; short?: boolean; record?: boolean }) {
    this.only = only?.split(",");
    this.short = short;
    this.record = record && !short;
  }

  /** So many rounds, or three in the short form. */
  rounds(count: number): number {
    return this.short ? Math.min(3, count) : count;
  }

  /**
   * Measures the parts that are asked for, one after another.
   * @throws A part that is not there.
   */
  async parts<Shared>(
    all: Readonly<Record<string, (shared: Shared) => Promise<readonly Row[]>>>,
    shared: Shared,
  ): Promise<Row[]> {
    const rows: Row[] = [];
    for (const name of this.only ?? Object.keys(all)) {
      const measure = all[name];
      if (measure === undefined)
        throw new Error(`no part ${name}; there are ${Object.keys(all).join(", ")}`);
      process.stderr.write(`  ${name} …\n`);
      rows.push(...(await measure(shared)));
    }
    return rows;
  }
}
