// A long suite: it installs, builds and tests the core in a folder without the rest.

import { execFileSync } from "node:child_process";
import { cpSync, existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { program, turboEnv } from "../setup/setup.mjs";
import mayImport from "./may-import.json" with { type: "json" };
import { root } from "./source-files.js";

const CORE = Object.keys(mayImport.core);
/**
 * Beside the packages: what builds, packs and tests any of them, and what the core's tests need.
 */
const BESIDE =
  /^(native|tools\/(bundle|conformance|setup|testing|tests|release\/(check-packages|packages|tree)\.ts))(\/|$)/;
const AT_THE_TOP = [
  "package.json",
  "pnpm-lock.yaml",
  "pnpm-workspace.yaml",
  "tsconfig.json",
  "turbo.json",
  "vitest.config.ts",
  ".gitignore",
  ".npmrc",
  "docs/errors.md",
];

const folder = scratchFolder();
const run = (command: string, args: readonly string[], env: NodeJS.ProcessEnv = {}) =>
  execFileSync(command, args, {
    cwd: folder,
    env: { ...turboEnv, ...env },
    encoding: "utf8",
    stdio: "pipe",
    maxBuffer: 2 ** 27,
  });

beforeAll(() => {
  const files = execFileSync("git", ["ls-files", "-coz", "--exclude-standard"], {
    cwd: root,
    encoding: "utf8",
    maxBuffer: 2 ** 26,
  });
  const isPart = (path: string) =>
    BESIDE.test(path) ||
    AT_THE_TOP.includes(path) ||
    CORE.some((name) => path.startsWith(`packages/${name}/`));
  for (const path of files
    .split("\0")
    .filter((each) => isPart(each) && existsSync(join(root, each)))) {
    mkdirSync(dirname(join(folder, path)), { recursive: true });
    cpSync(join(root, path), join(folder, path));
  }
  // What is compiled is the same.
  for (const path of ["native/build", "packages/neuron/native"])
    cpSync(join(root, path), join(folder, path), { recursive: true });
  run(program("pnpm"), ["install", "--offline", "--no-frozen-lockfile", "--ignore-scripts"]);
}, 300_000);

describe("the core, in a folder without the rest", () => {
  test("builds, with its declarations", () => {
    run("npx", ["turbo", "run", "build", "declarations", "--force"]);
    for (const name of CORE) {
      const { exports } = JSON.parse(
        readFileSync(join(folder, "packages", name, "package.json"), "utf8"),
      ) as {
        exports: { readonly ".": { readonly types: string; readonly default: string } };
      };
      for (const path of Object.values(exports["."]))
        expect(existsSync(join(folder, "packages", name, path)), `${name}: ${path}`).toBe(true);
    }
  }, 300_000);

  test("has types that agree, those of its tests too", () => {
    const config = {
      extends: "./tsconfig.json",
      include: ["packages/*/src", "packages/*/test", "tools/testing"],
    };
    writeFileSync(join(folder, "tsconfig.core.json"), JSON.stringify(config));
    run(process.execPath, [
      "node_modules/typescript-7/bin/tsc",
      "--noEmit",
      "-p",
      "tsconfig.core.json",
    ]);
  }, 300_000);

  test("packs as it is published", () => {
    run(process.execPath, ["--import", "tsx", "tools/release/check-packages.ts"]);
  }, 300_000);

  test("passes its tests", () => {
    const report = join(folder, "report.json");
    // Each package runs these tests without a retry; here only what the rest gives the core counts.
    const args = ["vitest", "run", "--retry=1", "--reporter=json"];
    args.push(`--outputFile.json=${report}`, "packages/");
    try {
      run("npx", args, { CI: "", KV_LONG: "", TURBO_HASH: "core" });
    } catch {
      // The report says which tests failed.
    }
    const { testResults, numPassedTests } = JSON.parse(readFileSync(report, "utf8")) as {
      numPassedTests: number;
      testResults: {
        name: string;
        status: string;
        message: string;
        assertionResults: { status: string; fullName: string }[];
      }[];
    };
    const failed = testResults.flatMap(({ name, status, message, assertionResults }) => [
      ...assertionResults
        .filter((each) => each.status === "failed")
        .map(({ fullName }) => `${name}: ${fullName}`),
      ...(status === "failed" && assertionResults.length === 0 ? [`${name}: ${message}`] : []),
    ]);
    expect(failed.join("\n")).toBe("");
    expect(numPassedTests).toBeGreaterThan(2500);
  }, 1_200_000);
});
