// node tools/release/check-packages.mjs: packs every published package once, and checks with
// publint and attw that its `exports` resolve.
import { execFile } from "node:child_process";
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { checkPackage, createPackageFromTarballData } from "@arethetypeswrong/core";
import { publint } from "publint";
import { formatMessage } from "publint/utils";

const root = fileURLToPath(new URL("../..", import.meta.url));
/** A package for ES modules alone is not resolved so. */
const NOT_ESM = ["node10", "node16-cjs"];

async function packageProblems() {
  const folders = readdirSync(join(root, "packages"))
    .map((name) => join(root, "packages", name))
    .filter(
      (folder) => existsSync(join(folder, "package.json")) && manifestOf(folder).private !== true,
    );
  const tarballs = mkdtempSync(join(tmpdir(), "kv-tarballs-"));
  try {
    const args = ["pack", "--json", "--pack-destination", tarballs, ...folders];
    const { stdout } = await promisify(execFile)("npm", args, { cwd: root, maxBuffer: 2 ** 27 });
    const problems = [];
    for (const [at, { filename }] of JSON.parse(stdout).entries()) {
      const bytes = readFileSync(join(tarballs, filename.replace(/^@/, "").replace("/", "-")));
      problems.push(...(await problemsOf(folders[at], bytes)));
    }
    return problems;
  } finally {
    rmSync(tarballs, { recursive: true });
  }
}

const manifestOf = (folder) => JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));

async function problemsOf(folder, bytes) {
  const manifest = manifestOf(folder);
  const data = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  const { messages } = await publint({ strict: true, pack: { tarball: data } });
  const { types, problems } = await checkPackage(
    createPackageFromTarballData(new Uint8Array(bytes)),
  );
  const wrong = (problems ?? []).filter(({ resolutionKind }) => !NOT_ESM.includes(resolutionKind));
  return [
    ...(types === false ? ["attw: it has no types"] : []),
    ...messages.map((message) => `publint: ${formatMessage(message, manifest, { color: false })}`),
    ...wrong.map((problem) => `attw: ${JSON.stringify(problem)}`),
  ].map((text) => `${manifest.name}: ${text}`);
}

const problems = await packageProblems();
for (const problem of problems) console.error(problem);
process.exitCode = problems.length === 0 ? 0 : 1;
