import { readFileSync } from "node:fs";

/**
 * @kv/nixl and the packages of this repository that it cannot do without, which npm installs with
 * it on every platform.
 */
export function nixlPackages() {
  const found = new Set(["@kv/nixl"]);
  for (const name of found) {
    const folder = name.slice("@kv/".length);
    const { dependencies = {} } = JSON.parse(
      readFileSync(new URL(`../../packages/${folder}/package.json`, import.meta.url), "utf8"),
    );
    for (const [each, range] of Object.entries(dependencies))
      if (range.startsWith("workspace:")) found.add(each);
  }
  return [...found];
}
