import { readFileSync } from "node:fs";
import { join } from "node:path";
import { publishedPackages } from "./packages.js";

/** Below 1.0 a breaking change raises the minor version. */
export const BREAKING = { name: "@kv/topology", summary: "A breaking change." };

/**
 * As semver requires: the package gets a new minor version (below 1.0), packages whose range no
 * longer fits it a new patch version, and no others a new version.
 */
export function secondReleaseProblems(
  tree: string,
  {
    before,
    after,
  }: { readonly before: ReadonlyMap<string, string>; readonly after: ReadonlyMap<string, string> },
): string[] {
  const packages = publishedPackages(tree);
  const expected = new Map(before);
  const [major = 0, minor = 0] = (before.get(BREAKING.name) ?? "").split(".").map(Number);
  const breaking = `${major}.${minor + 1}.0`;
  expected.set(BREAKING.name, breaking);
  const dependents = [...packages].filter(
    ([, { manifest }]) => manifest.dependencies?.[BREAKING.name] !== undefined,
  );
  for (const [name] of dependents) expected.set(name, nextPatch(before.get(name) ?? ""));
  const wrong = [...expected]
    .filter(([name, version]) => after.get(name) !== version)
    .map(([name, version]) => `${name} has the version ${after.get(name)}, not ${version}`);
  const changelog = (name: string) =>
    readFileSync(join(tree, packages.get(name)?.folder ?? "", "CHANGELOG.md"), "utf8");
  const entries = [
    {
      name: BREAKING.name,
      texts: [`## ${breaking}`, `- ${BREAKING.summary}`, `## ${before.get(BREAKING.name)}`],
    },
    ...dependents.map(([name]) => ({
      name,
      texts: [`## ${expected.get(name)}`, `${BREAKING.name} ${breaking}`, `## ${before.get(name)}`],
    })),
  ];
  const unwritten = entries.flatMap(({ name, texts }) =>
    texts
      .filter((text) => !changelog(name).includes(text))
      .map((text) => `the CHANGELOG of ${name} does not say ${text}`),
  );
  return [...wrong, ...unwritten];
}

function nextPatch(version: string): string {
  const [major = 0, minor = 0, patch = 0] = version.split(".").map(Number);
  return `${major}.${minor}.${patch + 1}`;
}
