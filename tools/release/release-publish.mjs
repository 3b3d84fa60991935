// node tools/release/release-publish.mjs FOLDER [NPM-FLAG …]: publishes the tarballs that
// FOLDER/order.json lists, in its order, each after the packages that it depends on. A version that
// the registry has already is skipped, so that a publish that was interrupted can be repeated.
import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { resolve } from "node:path";

const [folder, ...flags] = process.argv.slice(2);
if (folder === undefined) {
  console.error(
    "release-publish: usage: node tools/release/release-publish.mjs FOLDER [NPM-FLAG …]",
  );
  process.exit(2);
}

const config = flags.filter((flag) => flag.startsWith("--userconfig"));

/** Whether the registry has the version. Throws when it cannot be asked. */
function isPublished(specifier) {
  const { status, stdout, stderr } = spawnSync(
    "npm",
    ["view", specifier, "version", "--json", ...config],
    {
      encoding: "utf8",
    },
  );
  if (status === 0) return stdout.trim() !== "";
  if (`${stdout}${stderr}`.includes("E404")) return false;
  throw new Error(`npm view ${specifier} ended with ${status}\n${stderr}`);
}

for (const { name, version, file } of JSON.parse(
  readFileSync(resolve(folder, "order.json"), "utf8"),
)) {
  if (isPublished(`${name}@${version}`)) {
    console.log(`${name}@${version} is published already`);
    continue;
  }
  const args = ["publish", resolve(folder, file), "--access", "public", ...flags];
  const { status, stdout, stderr } = spawnSync("npm", args, { encoding: "utf8" });
  if (status !== 0)
    throw new Error(`npm ${args.join(" ")} ended with ${status}\n${stdout}${stderr}`);
  console.log(`${name}@${version} published`);
}
