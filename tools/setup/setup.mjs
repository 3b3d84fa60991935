// npm run setup [-- --with-libfabric]: prepares a machine for the demo and the tests: dependencies,
// build, addon, NIXL. turbo builds what its cache does not have. Where NIXL is not available, one
// line says why, and the embedded transport is used instead.
import { spawn } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { delimiter, join } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

export const root = fileURLToPath(new URL("../..", import.meta.url));
const programs = join(root, "node_modules/.bin");
export const program = (name) => join(programs, name);
export const vitest = program("vitest");

/** The environment of turbo, which looks for pnpm on PATH. */
export const turboEnv = {
  ...process.env,
  PATH: `${programs}${delimiter}${process.env.PATH}`,
  TURBO_TELEMETRY_DISABLED: "1",
};

const say = (line) => process.stderr.write(`${line}\n`);

/** With `show` output goes to stderr; otherwise the error of a failure contains it. */
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

/** The terminal's SIGINT reaches both. Resolves with the exit code, also after `timeout` ms. */
export function runInTerminal(command, args, env = process.env, timeout = undefined) {
  const child = spawn(command, args, { cwd: root, env, stdio: "inherit", timeout });
  for (const signal of ["SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
  return new Promise((resolve) => child.on("close", (code) => resolve(code ?? 1)));
}

export const turboInTerminal = (args, env, timeout) =>
  runInTerminal(program("turbo"), ["run", ...args], { ...turboEnv, ...env }, timeout);

/** The error of a failure has the output. */
export const turbo = (...args) =>
  run(program("turbo"), ["run", ...args, "--output-logs=errors-only"], { env: turboEnv });

async function step(name, work) {
  const begun = Date.now();
  let isSaid = false;
  const say10 = () => say(`${name} … ${Math.round((Date.now() - begun) / 1000)} s`);
  let ticker;
  const first = setTimeout(() => {
    isSaid = true;
    say(`${name} …`);
    ticker = setInterval(say10, 10_000);
  }, 1_500);
  try {
    return await work();
  } finally {
    clearTimeout(first);
    clearInterval(ticker);
    if (isSaid) say(`${name}: ended after ${((Date.now() - begun) / 1000).toFixed(1)} s`);
  }
}

const firstLine = (error) => String(error?.message ?? error).split("\n")[0];

/** With the pinned pnpm, which is one of them; the first time through npx. */
function install() {
  const pnpm = existsSync(program("pnpm"))
    ? [program("pnpm")]
    : ["npx", "--yes", JSON.parse(readFileSync(join(root, "package.json"), "utf8")).packageManager];
  return run(pnpm[0], [...pnpm.slice(1), "install", "--frozen-lockfile", "--ignore-scripts"]);
}

/** All packages, or one with those that it needs. */
export const bundles = (name) =>
  step("build", () => turbo("build", ...(name === undefined ? [] : [`--filter=${name}...`])));

/**
 * `only` limits the build to a package and what it needs. `tests: false` leaves out declarations
 * and libraries of tests. `native`: "addon" or "none". Returns `{ nixl: { ready, why?, noLibfabric?
 * } }`. Throws only when the dependencies or the build fail.
 */
export async function setup({
  withLibfabric = process.env.CI === "true",
  native = "nixl",
  tests = true,
  only,
} = {}) {
  const [major, minor] = process.versions.node.split(".").map(Number);
  if (major < 20 || (major === 20 && minor < 19))
    throw new Error(`Node ${process.versions.node} is too old: 20.19 or newer is needed`);
  await step("install", install);
  // The compiler and the network have different limits.
  const addon = hasNative(native) ? compile(tests) : undefined;
  await bundles(only);
  if (tests) await step("declarations", () => turbo("declarations"));
  const fetched =
    native === "nixl" && hasNative(native) ? await library(withLibfabric) : notReady(native);
  const why = await addon;
  return { nixl: why === undefined ? fetched : { ready: false, why } };
}

const hasNative = (native) => native !== "none" && process.platform === "linux";

const notReady = (native) => ({
  ready: false,
  why: native === "nixl" ? `no NIXL for ${process.platform}` : "NIXL was not requested",
});

/** Ends with 2 where it fails. */
export async function setupOrEnd(options) {
  try {
    return await setup(options);
  } catch (error) {
    say(`set-up failed: ${error.message}`);
    process.exit(2);
  }
}

/** Ends with 1 without NIXL, which `what` needs. */
export async function setupWithNixl(what) {
  const { nixl } = await setup();
  if (nixl.ready) return;
  say(`${what}: ${nixl.why}`);
  process.exit(1);
}

export const runSource = (file, args) =>
  runInTerminal(process.execPath, ["--import", "tsx", join(root, file), ...args]);

/** And for tests its stand-ins. Returns the reason where it cannot. */
async function compile(tests) {
  try {
    await step("compile the addon", () => turbo("compile"));
    // What turbo takes from its cache compiles nothing, and tests load a platform package's addon.
    const { removeOutdatedAddons } = await import("../../native/scripts/platform-packages.mjs");
    removeOutdatedAddons();
    if (tests) await step("compile what tests load", () => turbo("compile:stand-ins"));
  } catch (error) {
    // The build says what is missing and how to install it; compiler errors come before it.
    const lines = String(error.message).split("\n");
    const why =
      lines.filter((line) => /\b(kv_nixl|native): /.test(line)).at(-1) ?? firstLine(error);
    for (const line of [...lines.filter((each) => /\berror: /.test(each)).slice(0, 3), why])
      say(line);
    return why.replace(/^\S+:compile\S*: /, "");
  }
}

async function library(withLibfabric) {
  try {
    const { findLibrary, installNixl } = await import(
      pathToFileURL(join(root, "packages/nixl/dist/index.js")).href
    );
    try {
      // The package of libraries, when it is built, has not all plugins that tests need.
      if ((await findLibrary()).startsWith(join(root, "native/npm")))
        throw new Error("not the whole wheel");
    } catch {
      say("fetch NIXL …");
      await installNixl({ onProgress: say });
    }
    return { ready: true, noLibfabric: withLibfabric ? await libfabric() : undefined };
  } catch (error) {
    const why = `NIXL is not available (${firstLine(error)})`;
    const hint = error?.hint ?? "npx --no-install kv-nixl install";
    say(`${why}; remedy: ${hint.replace(/npx --no-install (kv-\w+)/g, "npm run $1 --")}`);
    return { ready: false, why };
  }
}

/**
 * Packs NIXL's libraries, with 180 MB through pip at the first time. Returns the reason where they
 * are not available: tests over LIBFABRIC are then skipped by name, and fail with CI=true.
 */
async function libfabric() {
  const platform = `linux-${process.arch}-gnu`;
  try {
    const build = ["native/scripts/build-libs.mjs", "--platform", platform];
    await step("pack the libraries of LIBFABRIC", () => run(process.execPath, build));
    return undefined;
  } catch (error) {
    const why = `LIBFABRIC is not available (${firstLine(error)})`;
    say(`${why}; remedy: npm run build:libs -- --platform ${platform}`);
    return why;
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const { nixl: state } = await setup(
    process.argv.includes("--with-libfabric") ? { withLibfabric: true } : {},
  );
  say(state.ready ? "ready, with NIXL" : "ready, without NIXL: the embedded transport is used");
}
