// npm run lint:packages: packs every published package once, and checks with publint and attw that
// its `exports` resolve.
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { checkPackage, createPackageFromTarballData } from "@arethetypeswrong/core";
import { publint } from "publint";
import { formatMessage } from "publint/utils";
import { type PackageManifest, publishedPackages, root } from "./packages.js";
import { pack } from "./tree.js";

/** A package for ES modules alone is not resolved so. */
const NOT_ESM = ["node10", "node16-cjs"];

async function problemsOf(manifest: PackageManifest, tarball: string): Promise<string[]> {
  const bytes = new Uint8Array(readFileSync(tarball));
  const { messages } = await publint({ strict: true, pack: { tarball: bytes.buffer } });
  const analysis = await checkPackage(createPackageFromTarballData(bytes));
  const wrong = analysis.types === false ? [] : analysis.problems;
  return [
    ...(analysis.types === false ? ["attw: it has no types"] : []),
    ...messages.map((message) => `publint: ${formatMessage(message, manifest, { color: false })}`),
    ...wrong
      .filter(
        (problem) => !("resolutionKind" in problem && NOT_ESM.includes(problem.resolutionKind)),
      )
      .map((problem) => `attw: ${JSON.stringify(problem)}`),
  ];
}

const folder = mkdtempSync(join(tmpdir(), "kv-tarballs-"));
try {
  const ours = [...publishedPackages()].filter(([, { folder }]) => folder.startsWith("packages/"));
  const tarballs = await pack(
    root,
    ours.map(([name]) => name),
    folder,
  );
  for (const [name, { manifest }] of ours)
    for (const problem of await problemsOf(manifest, tarballs.get(name) ?? "")) {
      console.error(`${name}: ${problem}`);
      process.exitCode = 1;
    }
} finally {
  rmSync(folder, { recursive: true });
}
