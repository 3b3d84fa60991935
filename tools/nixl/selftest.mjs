// npm run kv-nixl -- selftest: installs what a user of @kv/nixl installs into an empty folder, and
// runs the first example of its README there over UCX and LIBFABRIC: with an empty HOME, and with
// node alone on PATH.
import { execFileSync } from "node:child_process";
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { nixlPackages } from "../../native/scripts/pack.mjs";
import { root, run } from "../setup/setup.mjs";

const EXPECTED = ["owner: notified of read", "read 196608 bytes; the last byte is 7"];
const packed = join(root, "native/build/packages");
const platform = `${process.platform}-${process.arch}-gnu`;

function tarballs() {
  const { version } = JSON.parse(readFileSync(join(root, "packages/nixl/package.json"), "utf8"));
  const names = [...nixlPackages(), `@kv/nixl-${platform}`, `@kv/nixl-libs-${platform}`];
  const there = readdirSync(packed);
  return names.map((name) => {
    const file = `${name.replace("@kv/", "kv-")}-${version}.tgz`;
    if (!there.includes(file))
      throw new Error(`${packed} has no ${file}: there is no package for ${platform}`);
    return [name, `file:${join(packed, file)}`];
  });
}

function npmProgram() {
  const folders = (process.env.PATH ?? "").split(":");
  const found = folders.map((folder) => join(folder, "npm")).find((path) => existsSync(path));
  if (found === undefined) throw new Error("npm is not on PATH");
  return realpathSync(found);
}

function install({ folder, home, bin }) {
  const files = Object.fromEntries(tarballs());
  const manifest = {
    name: "selftest",
    private: true,
    type: "module",
    dependencies: files,
    overrides: files,
  };
  writeFileSync(join(folder, "package.json"), JSON.stringify(manifest));
  const npm = (args, options) =>
    execFileSync(process.execPath, [npmProgram(), ...args], {
      encoding: "utf8",
      stdio: "pipe",
      ...options,
    });
  const configured = (key) => npm(["config", "get", key], { cwd: root }).trim();
  const env = {
    ...process.env,
    HOME: home,
    PATH: bin,
    npm_config_userconfig: configured("userconfig"),
    npm_config_cache: configured("cache"),
    npm_config_prefer_offline: "true",
  };
  npm(["install", "--ignore-scripts", "--no-audit", "--no-fund"], { cwd: folder, env });
}

function node(args, { folder, home, bin }, variables = {}) {
  const env = { HOME: home, PATH: bin, ...variables };
  const options = { cwd: folder, env, encoding: "utf8", timeout: 120_000 };
  return execFileSync(join(bin, "node"), args, options).trim();
}

export async function selftest() {
  const script = (name) => join(root, "native/scripts", name);
  await run(process.execPath, [script("build-platforms.mjs"), "--platform", platform], {
    show: true,
  });
  await run(process.execPath, [script("build-libs.mjs"), "--platform", platform], { show: true });
  const work = mkdtempSync(join(tmpdir(), "kv-nixl-selftest-"));
  try {
    const [folder, home, bin] = ["user", "home", "bin"].map((name) => join(work, name));
    for (const path of [folder, home, bin]) mkdirSync(path);
    symlinkSync(process.execPath, join(bin, "node"));
    const place = { folder, home, bin };
    install(place);

    const cli = "node_modules/@kv/nixl/bin/kv-nixl.js";
    const library = node([cli, "where"], place);
    if (!library.startsWith(join(folder, "node_modules/@kv/nixl-libs-"))) {
      throw new Error(`NIXL was loaded from ${library}, not from the package of libraries`);
    }
    process.stdout.write(`ok    NIXL is ${library.slice(folder.length + 1)}\n`);

    const readme = readFileSync(join(root, "packages/nixl/README.md"), "utf8");
    const [, example = ""] = /^```ts\n([\s\S]*?)^```$/m.exec(readme) ?? [];
    writeFileSync(join(folder, "two.mjs"), example);
    for (const backend of ["UCX", "LIBFABRIC"]) {
      const lines = node(["two.mjs"], place, { NIXL_BACKEND: backend }).split("\n").sort();
      if (lines.join() !== EXPECTED.join())
        throw new Error(`the README's example printed over ${backend}:\n${lines.join("\n")}`);
      for (const line of lines) process.stdout.write(`ok    ${backend}: ${line}\n`);
    }

    const left = readdirSync(home);
    if (left.length > 0) throw new Error(`the example wrote into HOME: ${left.join(", ")}`);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}
