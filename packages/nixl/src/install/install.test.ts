import { createHash } from "node:crypto";
import { chmod, mkdir, mkdtemp, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { afterEach, beforeEach, expect, test } from "vitest";
import { installNixl } from "./install.js";
import { wheelFor } from "./wheels.js";

let folder = "";
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), "kv-nixl-install-"));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

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

async function failure(script: string | undefined): Promise<KvError> {
  const error: unknown = await installNixl({ environment: await withPython(script) }).catch(
    (caught: unknown) => caught,
  );
  expect(KvError.is(error, "KV_INSTALL_FAILED")).toBe(true);
  const left = await readdir(join(folder, "cache", "kv-nixl"));
  expect(left).toEqual([]);
  return error as KvError;
}

const linux = process.platform === "linux" && process.arch === "x64";

test.runIf(linux)("without python3, the hint names the package to install", async () => {
  const { message, hint } = await failure(undefined);
  expect(message).toContain("python3");
  expect(hint).toContain("python3-pip");
});

test.runIf(linux)("without pip, the hint says how to get it", async () => {
  const { message, hint } = await failure(
    "echo '/usr/bin/python3: No module named pip' >&2; exit 1",
  );
  expect(message).toContain("no pip");
  expect(hint).toContain("ensurepip");
});

test.runIf(linux)(
  "without a network, the error has pip's reason and a command to try",
  async () => {
    const { message, hint, details } = await failure(
      "echo 'WARNING: retrying'; echo 'ERROR: no route to the index' >&2; exit 1",
    );
    expect(message).toContain("ERROR: no route to the index");
    expect(hint).toContain(
      "python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12",
    );
    expect(hint).not.toContain(folder);
    expect(details.output).toContain("WARNING: retrying");
  },
);

test.runIf(linux)(
  "refuses a wheel with another digest than the pinned one, and names both",
  async () => {
    const script = `while [ "$1" != --dest ]; do shift; done; printf forged > "$2/nixl_cu12-1.5.0.whl"`;
    const { message } = await failure(script);
    expect(message).toContain(createHash("sha256").update("forged").digest("hex"));
    expect(message).toContain(wheelFor("1.5.0", 12, "x64").sha256);
  },
);

test.runIf(linux)(
  "refuses another file than the pinned wheel by its name, and leaves nothing behind",
  async () => {
    const environment = await withPython(undefined);
    const wheel = join(folder, "nixl_cu12-1.4.0.whl");
    const install = () =>
      installNixl({ environment, wheel }).catch((caught: unknown) => caught as KvError);
    const absent = await install();
    expect(absent).toMatchObject({
      code: "KV_INSTALL_FAILED",
      message: expect.stringContaining(wheel),
    });
    await writeFile(wheel, "another");
    const { code, message, hint } = (await install()) as KvError;
    expect(code).toBe("KV_INSTALL_FAILED");
    expect(message).toContain(`${wheel} is not the wheel of nixl-cu12==1.5.0`);
    expect(message).toContain(createHash("sha256").update("another").digest("hex"));
    expect(message).toContain(wheelFor("1.5.0", 12, "x64").sha256);
    expect(hint).toContain(
      "python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12",
    );
    expect(await readdir(join(folder, "cache", "kv-nixl"))).toEqual([]);
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
    await expect(installNixl({ environment, force: true })).rejects.toMatchObject({
      code: "KV_INSTALL_FAILED",
    });
    expect(await readFile(installed.library, "utf8")).toBe("here");
  },
);

test("versions and machines without a pinned digest are refused", () => {
  expect(() => wheelFor("9.9.9", 12, "x64")).toThrow(/no wheel is pinned for NIXL 9.9.9/);
  expect(() => wheelFor("1.5.0", 12, "riscv64")).toThrow(/riscv64/);
  for (const arch of ["x64", "arm64"])
    for (const cuda of [12, 13] as const)
      expect(wheelFor("1.5.0", cuda, arch).sha256).toMatch(/^[0-9a-f]{64}$/);
});
