// npm run setup [-- --fresh --with-libfabric]: prepares a machine for the demo and the tests: dependencies, build, addon, NIXL. A step is skipped when its
// inputs have not changed. Where NIXL is not available, one line says why, and the embedded transport is used instead.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

export const root = fileURLToPath(new URL("..", import.meta.url));
const stamps = join(root, "node_modules", ".cache", "kv-setup.json");
const manifest = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));

/** The command line of the pinned pnpm: the one on PATH when it is that version, else through npx. */
export const pnpm = ["npx", "--yes", manifest.packageManager];

const say = (line) => process.stderr.write(`${line}\n`);

/** Runs a command. With `show` its output goes to stderr; otherwise only the error of a failure contains it. */
export function run(command, args, { cwd = root, show = false, env = process.env } = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, { cwd, env, stdio: ["ignore", "pipe", "pipe"] });
    const chunks = [];
    for (const stream of [child.stdout, child.stderr]) {
      stream.on("data", (data) => (show ? process.stderr.write(data) : chunks.push(data)));
    }
    child.on("error", reject);
    child.on("close", (code) => {
      const output = Buffer.concat(chunks).toString();
      if (code === 0) resolve(output);
      else
        reject(
          new Error(
            `${[command, ...args].join(" ")} ended with ${code}\n${output.split("\n").slice(-40).join("\n")}`,
          ),
        );
    });
  });
}

/** Runs a command on the terminal of this process, whose SIGINT reaches both. Resolves with its exit code. */
export function runInTerminal(command, args, env = process.env) {
  const child = spawn(command, args, { cwd: root, env, stdio: "inherit" });
  for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
  return new Promise((resolve) => child.on("close", (code) => resolve(code ?? 1)));
}

export const vitest = join(root, "node_modules/.bin/vitest");

/** What builds, tests and packing write beside the sources; and fixtures and pages, which no build reads. */
const OUTPUTS =
  /^(node_modules|dist(-\d+)?|build|coverage|__pycache__|fixtures)$|\.(tgz|tsbuildinfo|node|log|md)$/;

/** A digest of files, by paths from the root of the repository. */
export function digest(paths) {
  const hash = createHash("sha256");
  const visit = (path) => {
    if (!existsSync(path)) return;
    const stat = statSync(path);
    if (stat.isDirectory()) {
      for (const name of readdirSync(path).sort()) {
        if (!OUTPUTS.test(name)) visit(join(path, name));
      }
    } else if (!path.endsWith(".test.ts")) {
      hash
        .update(`${relative(root, path)}\0`)
        .update(readFileSync(path))
        .update("\0");
    }
  };
  for (const path of paths) visit(join(root, path));
  return hash.digest("hex");
}

const readStamps = () => {
  try {
    return JSON.parse(readFileSync(stamps, "utf8"));
  } catch {
    return {};
  }
};

/** Runs `work` unless the digest of `inputs` is that of the last success and all `outputs` exist. */
async function step(name, inputs, outputs, work) {
  const wanted = digest(inputs);
  if (readStamps()[name] === wanted && outputs.every((path) => existsSync(join(root, path)))) return;
  const begun = Date.now();
  say(`${name} …`);
  const ticker = setInterval(() => say(`${name} … ${Math.round((Date.now() - begun) / 1000)} s`), 10_000);
  try {
    await work();
  } finally {
    clearInterval(ticker);
  }
  mkdirSync(join(root, "node_modules", ".cache"), { recursive: true });
  writeFileSync(stamps, JSON.stringify({ ...readStamps(), [name]: wanted }));
  say(`${name}: done in ${((Date.now() - begun) / 1000).toFixed(1)} s`);
}

const firstLine = (error) => String(error?.message ?? error).split("\n")[0];

const SOURCES = ["packages", "apps", "tsconfig.base.json", "scripts/build.mjs", "pnpm-lock.yaml"];

/** Bundles the packages. Tests of programs start what it writes. */
export const bundles = () =>
  step(
    "build",
    SOURCES,
    ["packages/interface/dist/index.js", "packages/nixl/dist/index.js", "apps/demo/dist/main.js"],
    // A process of its own: in a fresh checkout esbuild was not there when this one began.
    () => run("node", ["scripts/build.mjs", "--no-types"]),
  );

/** The declarations of the packages, which nothing needs that runs. */
const declarations = () =>
  step(
    "declarations",
    [...SOURCES, "tsconfig.declarations.json", "tsconfig.json"],
    ["packages/interface/dist/index.d.ts"],
    () => run("node", ["scripts/build.mjs", "--only-types"]),
  );

/**
 * Runs all steps. `tests: false` leaves out the declarations and the libraries that only tests load. `native` limits native code to the addon (`"addon"`) or leaves
 * it out (`"none"`); `withLibfabric` also fetches the libraries of the LIBFABRIC backend. Returns `{ nixl: { ready, why?, noLibfabric? } }`: the reasons say why NIXL or LIBFABRIC is not available. Throws only
 * when the dependencies or the build fail.
 */
export async function setup({
  withLibfabric = process.env.CI === "true",
  native = "nixl",
  tests = true,
} = {}) {
  const [major, minor] = process.versions.node.split(".").map(Number);
  if (major < 20 || (major === 20 && minor < 19))
    throw new Error(`Node ${process.versions.node} is too old: 20.19 or newer is needed`);
  const workspaces = ["packages", "apps", "native", "tools", "examples"];
  const manifests = workspaces.flatMap((place) => {
    const names = existsSync(join(root, place)) ? readdirSync(join(root, place)) : [];
    return [`${place}/package.json`, ...names.map((name) => `${place}/${name}/package.json`)];
  });
  await step(
    "install",
    ["pnpm-lock.yaml", "pnpm-workspace.yaml", "package.json", ...manifests],
    ["node_modules/.modules.yaml"],
    () => run(pnpm[0], [...pnpm.slice(1), "install", "--frozen-lockfile", "--ignore-scripts"]),
  );
  await bundles();
  if (tests) await declarations();
  return { nixl: await nixl(withLibfabric, native, tests) };
}

/** `setup` of a program that ends with 2 where it fails. */
export async function setupOrEnd(options) {
  try {
    return await setup(options);
  } catch (error) {
    say(`set-up failed: ${error.message}`);
    process.exit(2);
  }
}

/** Ends with 1 where NIXL is not there, which `what` needs. */
export async function setupWithNixl(what) {
  const { nixl } = await setup();
  if (nixl.ready) return;
  say(`${what}: ${nixl.why}`);
  process.exit(1);
}

/** Runs a TypeScript program of this repository on the terminal, as `runInTerminal`. */
export const runSource = (file, args) =>
  runInTerminal(process.execPath, ["--import", "tsx", join(root, file), ...args]);

async function nixl(withLibfabric, native, tests) {
  const notRequested = { ready: false, why: "NIXL was not requested" };
  if (native === "none") return notRequested;
  if (process.platform !== "linux") return { ready: false, why: `no NIXL for ${process.platform}` };
  // The compiler and the network have different limits.
  const [why, fetched] = await Promise.all([
    addon(tests),
    native === "addon" ? notRequested : library(withLibfabric),
  ]);
  return why === undefined ? fetched : { ready: false, why };
}

/** Compiles the addon, and for tests its stand-ins. Returns the reason where it cannot. */
async function addon(tests) {
  try {
    await step(
      "compile the addon",
      ["native/src", "native/build.mjs", "native/scripts"],
      ["native/build/kv_nixl.node"],
      () => run("node", ["native/build.mjs", "--only-addon"]),
    );
    const fake = "native/build/libfake_nixl_capi.so";
    if (tests)
      await step("compile what tests load", ["native"], [fake], () => run("node", ["native/build.mjs"]));
  } catch (error) {
    // The last line of the build says what is missing and how to install it; compiler errors come before it.
    const lines = String(error.message).trim().split("\n");
    const why = lines.at(-1);
    for (const line of [...lines.filter((each) => /\berror: /.test(each)).slice(0, 3), why]) say(line);
    return why;
  }
}

/** Fetches NIXL's library, unless it is there. */
async function library(withLibfabric) {
  try {
    const { findLibrary, installNixl } = await import(
      pathToFileURL(join(root, "packages/nixl/dist/index.js")).href
    );
    try {
      // The package of libraries, when it is built, has not all plugins that tests need.
      if ((await findLibrary()).startsWith(join(root, "native/npm"))) throw new Error("not the whole wheel");
    } catch {
      say("fetch NIXL …");
      await installNixl({ onProgress: say });
    }
    return { ready: true, noLibfabric: withLibfabric ? await libfabric(installNixl) : undefined };
  } catch (error) {
    const why = `NIXL is not available (${firstLine(error)})`;
    const hint = error?.hint ?? "npx --no-install kv-nixl install";
    say(`${why}; remedy: ${hint.replace(/npx --no-install (kv-\w+)/g, "npm run $1 --")}`);
    return { ready: false, why };
  }
}

/**
 * Fetches the libraries of NIXL's LIBFABRIC plugin: 11 MB through pip. Returns the reason where they are not available; the tests over LIBFABRIC
 * are then skipped by name, and fail with CI=true.
 */
async function libfabric(installNixl) {
  try {
    await installNixl({ with: ["libfabric"], onProgress: say });
    return undefined;
  } catch (error) {
    const why = `LIBFABRIC is not available (${firstLine(error)})`;
    say(`${why}; remedy: ${error?.hint ?? "kv-nixl install --with libfabric"}`);
    return why;
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  if (process.argv.includes("--fresh")) rmSync(stamps, { force: true });
  const { nixl: state } = await setup(
    process.argv.includes("--with-libfabric") ? { withLibfabric: true } : {},
  );
  say(state.ready ? "ready, with NIXL" : "ready, without NIXL: the embedded transport is used");
}
