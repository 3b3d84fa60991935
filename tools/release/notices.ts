import { existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { root } from "./packages.js";
import { run } from "./tree.js";

/** Third-party packages whose code is in a tarball, by the folder of our package. */
const NODE_API = "native/node_modules/node-addon-api";
const BUNDLED: Readonly<Record<string, readonly string[]>> = {
  "native/npm/linux-x64-gnu": [NODE_API],
  "native/npm/linux-arm64-gnu": [NODE_API],
  "packages/neuron": [NODE_API],
  // In the page.
  "packages/kv-plan": ["packages/kv-plan/node_modules/zod"],
};

/**
 * MPL-2.0 is that of a library of vitest, which is a peer of @kv/conformance; Python-2.0 and
 * Unlicense are those of what @kubernetes/client-node needs.
 */
const ALLOWED_LICENSES = new Set(
  "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BlueOak-1.0.0 ISC MIT MPL-2.0 Python-2.0 Unlicense".split(
    " ",
  ),
);

/** Shared libraries beside the addon, whose licenses and sources its ATTRIBUTIONS.md names. */
const ALLOWED_LIBRARY_LICENSES = new Set(["BSL-1.0", "LGPL-2.1-or-later"]);

interface Component {
  readonly name: string;
  readonly version: string;
  readonly licenses?: readonly {
    readonly license?: { readonly id?: string };
    readonly expression?: string;
  }[];
}

/** CycloneDX, as far as it is read here. */
export interface Sbom {
  readonly bomFormat: string;
  readonly components: readonly Component[];
}

export async function sbomOf(folder: string): Promise<Sbom> {
  const text = await run("npm", ["sbom", "--sbom-format", "cyclonedx", "--omit", "dev"], {
    cwd: folder,
  });
  return JSON.parse(text) as Sbom;
}

export function licenseProblems({ components }: Sbom): string[] {
  return components
    .map((each) => ({ each, license: licenseOf(each) }))
    .filter(
      ({ each, license }) => !license.split(" AND ").every((one) => isAllowed(each.name, one)),
    )
    .map(
      ({ each, license }) => `${each.name} ${each.version} has the license ${license || "unknown"}`,
    );
}

const isAllowed = (name: string, license: string): boolean =>
  ALLOWED_LICENSES.has(license) ||
  (/^@kv\/nixl-libs-/.test(name) && ALLOWED_LIBRARY_LICENSES.has(license));

const licenseOf = ({ licenses = [] }: Component): string =>
  licenses.map(({ license, expression }) => license?.id ?? expression ?? "").join(" AND ");

export function noticesOf(folder: string, { components }: Sbom): string {
  return components
    .filter(({ name }) => !name.startsWith("@kv/"))
    .map((each) => noticeOf(join(folder, "node_modules", each.name), each.name, licenseOf(each)))
    .join("\n");
}

/** Of each package of a checkout that contains code of others. */
export function writeBundledNotices(tree: string): void {
  for (const [into, from] of Object.entries(BUNDLED)) {
    const notices = from.map((path) => {
      const folder = join(root, path);
      const { name, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as {
        readonly name: string;
        readonly license: string;
      };
      return noticeOf(folder, name, license);
    });
    writeFileSync(join(tree, into, "THIRD_PARTY_NOTICES.md"), notices.join("\n"));
  }
}

function noticeOf(folder: string, name: string, license: string): string {
  const file = existsSync(folder)
    ? readdirSync(folder).find((each) => /^licen[cs]e/i.test(each))
    : undefined;
  const text = file === undefined ? "" : readFileSync(join(folder, file), "utf8").trim();
  return `## ${name}\n\nLicense: ${license}\n\n${text}\n`;
}
