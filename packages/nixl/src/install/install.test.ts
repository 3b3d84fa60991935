import { createHash } from "node:crypto";
import { chmod, mkdir, readdir, readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeEach, expect, onTestFinished, test } from "vitest";
import { refused } from "../../test/support/refused.js";
import { type InstallOptions, installNixl } from "./install.js";
import { wheelFor } from "./wheels.js";

let folder = "";
beforeEach(() => {
  folder = scratchFolder(onTestFinished);
});

/** An environment whose python3 is this shell script. */
async function withPython(script: string | undefined) {
  const bin = join(folder, "bin");
  await mkdir(bin, { recursive: true });
  if (script !== undefined) {
    await writeFile(join(bin, "python3"), `#!/bin/sh\n${script}\n`);
    await chmod(join(bin, "python3"), 0o755);
  }
  const path = script === undefined ? bin : `${bin}:${process.env.PATH}`;
  return { HOME: folder, PATH: path, XDG_CACHE_HOME: join(folder, "cache") };
}

/** What an installation says when it fails. It leaves nothing behind. */
async function failure(options: InstallOptions) {
  const error = await refused(installNixl(options), "KV_INSTALL_FAILED");
  expect(await readdir(join(folder, "cache", "kv-nixl"))).toEqual([]);
  const { message, hint = "", details } = error;
  return { hint, said: `${message} ${hint} ${details.output}` };
}

const linux = process.platform === "linux" && process.arch === "x64";
const PINNED = linux ? wheelFor("1.5.0", 12, "x64").sha256 : "";
const sha256 = (text: string) => createHash("sha256").update(text).digest("hex");
const DOWNLOAD = "python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12";

test.runIf(linux).each<[string, string | undefined, ...string[]]>([
  [
    "without python3, the hint names the package to install",
    undefined,
    "python3 was not found",
    "python3-pip",
  ],
  [
    "without pip, the hint says how to get it",
    "echo '/usr/bin/python3: No module named pip' >&2; exit 1",
    "no pip",
    "ensurepip",
  ],
  [
    "without a network, the error has pip's reason, its output and a command to try",
    "echo 'WARNING: retrying'; echo 'ERROR: no route to the index' >&2; exit 1",
    "pip could not download NIXL: ERROR: no route to the index",
    "WARNING: retrying",
    DOWNLOAD,
  ],
  [
    "refuses a wheel with another digest than the pinned one, and names both",
    `while [ "$1" != --dest ]; do shift; done; printf forged > "$2/nixl_cu12-1.5.0.whl"`,
    sha256("forged"),
    PINNED,
  ],
])("%s", async (_, script, ...texts) => {
  const { said, hint } = await failure({ environment: await withPython(script) });
  for (const text of texts) expect(said).toContain(text);
  expect(hint).not.toContain(folder);
});

test.runIf(linux)(
  "refuses another file than the pinned wheel by its name, and leaves nothing behind",
  async () => {
    const environment = await withPython(undefined);
    const wheel = join(folder, "nixl_cu12-1.4.0.whl");
    expect((await failure({ environment, wheel })).said).toContain(wheel);
    await writeFile(wheel, "another");
    const { said } = await failure({ environment, wheel });
    const why = `${wheel} is not the wheel of nixl-cu12==1.5.0`;
    for (const text of [why, sha256("another"), PINNED, DOWNLOAD]) expect(said).toContain(text);
  },
);

test.runIf(linux)(
  "does not download an existing installation again, and removes the leftovers of a killed run",
  async () => {
    const environment = await withPython("exit 9");
    const wheel = wheelFor("1.5.0", 12, "x64");
    const cache = join(folder, "cache", "kv-nixl");
    const target = join(cache, wheel.folder, wheel.folders[0] ?? "");
    await mkdir(join(cache, ".installing-999999999-x"), { recursive: true });
    await mkdir(join(cache, `.installing-${process.pid}-y`));
    await installNixl({ environment }).catch(() => {});
    expect(await readdir(cache)).toEqual([`.installing-${process.pid}-y`]);
    await mkdir(target, { recursive: true });
    await writeFile(join(target, "libnixl_capi.so"), "here");
    const lines: string[] = [];
    const installed = await installNixl({ environment, onProgress: (line) => lines.push(line) });
    expect(installed).toMatchObject({ existed: true, library: join(target, "libnixl_capi.so") });
    expect(lines).toEqual([]);
    expect(await readFile(installed.library, "utf8")).toBe("here");
    // With `force` it is downloaded again. If that fails, the existing installation stays.
    await refused(installNixl({ environment, force: true }), "KV_INSTALL_FAILED");
    expect(await readFile(installed.library, "utf8")).toBe("here");
  },
);

test("versions and machines without a pinned digest are refused", () => {
  expect(() => wheelFor("9.9.9", 12, "x64")).toThrow("no wheel is pinned for NIXL 9.9.9");
  expect(() => wheelFor("1.5.0", 12, "riscv64")).toThrow("riscv64");
  for (const arch of ["x64", "arm64"])
    for (const cuda of [12, 13] as const)
      expect(wheelFor("1.5.0", cuda, arch).sha256).toMatch(/^[0-9a-f]{64}$/);
});
