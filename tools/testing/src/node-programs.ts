import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { basename, dirname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { build, type Plugin } from "esbuild";

const root = join(import.meta.dirname, "../../..");

/** As the set-up of every test run builds it: `kv-proxy`, or `demo`. */
export function builtProgram(name: string): string {
  if (name === "demo") return join(root, "apps/demo/dist/main.js");
  const folder = join(root, "packages", name === "kv-plan" ? name : name.replace(/^kv-/, ""));
  const { bin } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as {
    readonly bin: Readonly<Record<string, string>>;
  };
  return join(folder, bin[name] ?? "");
}

/** All but the first source keep their place; that one may start itself again. */
const sourceUrls = (entry: string): Plugin => ({
  name: "source-urls",
  setup({ onLoad }) {
    onLoad({ filter: /\.ts$/ }, ({ path }) =>
      path === entry
        ? undefined
        : {
            loader: "ts",
            contents: readFileSync(path, "utf8")
              .replaceAll(/import\.meta\.url/g, JSON.stringify(pathToFileURL(path).href))
              .replaceAll(/import\.meta\.dirname/g, JSON.stringify(dirname(path))),
          },
    );
  },
});

const bundles = new Map<string, Promise<string>>();

/**
 * `node` starts the bundle in a fifth of the time that tsx takes. `code` is run in place of what
 * the file contains.
 */
export function bundled(file: string, code?: string): Promise<string> {
  const key = `${file} ${code ?? ""}`;
  const made = bundles.get(key) ?? bundle(file, code);
  bundles.set(key, made);
  return made;
}

async function bundle(file: string, code: string | undefined): Promise<string> {
  const input =
    code === undefined
      ? { entryPoints: [file] }
      : {
          stdin: {
            contents: code,
            resolveDir: dirname(file),
            sourcefile: file,
            loader: "ts" as const,
          },
        };
  const { outputFiles } = await build({
    ...input,
    bundle: true,
    write: false,
    format: "esm",
    platform: "node",
    target: "node20.19",
    logLevel: "error",
    plugins: [sourceUrls(file)],
    tsconfig: join(root, "tsconfig.json"),
    external: ["onnxruntime-node", "typescript", "esbuild", "zeromq"],
    // Some dependencies are CommonJS.
    banner: {
      js: 'import { createRequire as r } from "node:module"; const require = r(import.meta.url);',
    },
  });
  const text = outputFiles[0]?.text ?? "";
  let folder = dirname(file);
  while (!existsSync(join(folder, "package.json"))) folder = dirname(folder);
  const cache = join(folder, "node_modules/.cache/kv-test");
  mkdirSync(cache, { recursive: true });
  const digest = createHash("sha256").update(text).digest("hex").slice(0, 16);
  const path = join(cache, `${basename(file, ".ts")}-${digest}.mjs`);
  // Other test runs may write the same file.
  writeFileSync(`${path}-${process.pid}`, text);
  renameSync(`${path}-${process.pid}`, path);
  return path;
}
