import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { Session } from "node:inspector/promises";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { build } from "esbuild";
import { root } from "./source-files.js";

/** esbuild writes the path of each file before its text. */
const FILE_IN_BUNDLE = /^\/\/ (?:\.\.\/)*((?:packages|apps|node_modules)\/\S+)$/gm;

/** A bundle: where the text of each file begins, in the order of the text. */
interface Bundle {
  readonly name: string;
  readonly files: readonly { readonly path: string; readonly begins: number }[];
}

/**
 * Finds the source files of which functions run. Each module is loaded with a copy of everything
 * that it imports, so that what P's connector runs is told from what D's runs.
 */
export class ExecutedFiles {
  readonly #session = new Session();
  /** By the address of the bundle. */
  readonly #bundles = new Map<string, Bundle>();

  /** Begins to count the calls of functions. */
  static async open(): Promise<ExecutedFiles> {
    const executed = new ExecutedFiles();
    executed.#session.connect();
    await executed.#session.post("Profiler.enable");
    await executed.#session.post("Profiler.startPreciseCoverage", {
      callCount: true,
      detailed: false,
    });
    return executed;
  }

  /** Loads a source file, and what it imports, under a name of its own. */
  async load<Module>(name: string, file: string): Promise<Module> {
    const folder = mkdtempSync(join(tmpdir(), "kv-executed-"));
    try {
      const bundle = join(folder, `${name}.cjs`);
      await build({
        entryPoints: [join(root, file)],
        outfile: bundle,
        bundle: true,
        format: "cjs",
        platform: "node",
        target: "node20",
        logLevel: "error",
        tsconfig: join(root, "tsconfig.json"),
        // As in the package's own bundle, which lies in a folder beside the source's.
        define: {
          "import.meta.url": JSON.stringify(
            pathToFileURL(join(root, dirname(file), "../dist/index.js")).href,
          ),
        },
        // V8 has one counter for equal texts.
        banner: { js: `// ${name}` },
      });
      const url = pathToFileURL(bundle).href;
      const files = Array.from(readFileSync(bundle, "utf8").matchAll(FILE_IN_BUNDLE), (match) => ({
        path: match[1] ?? "",
        begins: match.index,
      }));
      this.#bundles.set(url, { name, files });
      // Not with `import`: vitest would change the text.
      return createRequire(url)(bundle) as Module;
    } finally {
      rmSync(folder, { recursive: true });
    }
  }

  /**
   * Runs work. Returns the paths of the files that ran in it, by the name of the module that was
   * loaded.
   */
  async during(work: () => Promise<void>): Promise<ReadonlyMap<string, ReadonlySet<string>>> {
    await this.#take();
    await work();
    return await this.#take();
  }

  /** Counts no more. */
  async close(): Promise<void> {
    await this.#session.post("Profiler.stopPreciseCoverage");
    this.#session.disconnect();
  }

  /** The files that ran since the last call. */
  async #take(): Promise<Map<string, Set<string>>> {
    const { result } = await this.#session.post("Profiler.takePreciseCoverage");
    const ran = new Map<string, Set<string>>();
    for (const { url, functions } of result) {
      const bundle = this.#bundles.get(url);
      if (bundle === undefined) continue;
      const paths = new Set<string>();
      for (const { ranges } of functions) {
        const [range] = ranges;
        if (range === undefined || range.count === 0) continue;
        const file = bundle.files.findLast(({ begins }) => begins <= range.startOffset);
        if (file !== undefined && !file.path.startsWith("node_modules/")) paths.add(file.path);
      }
      ran.set(bundle.name, paths);
    }
    return ran;
  }
}
