import { readdirSync } from "node:fs";
import { join, relative } from "node:path";
import { sha256 } from "../images/oci-archive.js";
import { run } from "./tree.js";

/** An in-toto statement (v1) with SLSA's build provenance (v1), unsigned. */
export interface Provenance {
  readonly _type: "https://in-toto.io/Statement/v1";
  readonly subject: readonly {
    /** From the folder of the release, with slashes. */
    readonly name: string;
    readonly digest: { readonly sha256: string };
  }[];
  readonly predicateType: "https://slsa.dev/provenance/v1";
  readonly predicate: object;
}

/** The provenance of all files of a release. The release's workflow signs the same files. */
export async function provenanceOf(
  folder: string,
  { repository, checkout }: { readonly repository: string; readonly checkout: string },
): Promise<Provenance> {
  const commit = (await run("git", ["rev-parse", "HEAD"], { cwd: checkout })).trim();
  const files = readdirSync(folder, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(folder, join(entry.parentPath, entry.name)))
    .sort();
  const subject: Provenance["subject"][number][] = [];
  for (const name of files)
    subject.push({ name, digest: { sha256: await sha256(join(folder, name)) } });

  return {
    _type: "https://in-toto.io/Statement/v1",
    subject,
    predicateType: "https://slsa.dev/provenance/v1",
    predicate: {
      buildDefinition: {
        buildType: "https://actions.github.io/buildtypes/workflow/v1",
        externalParameters: {
          workflow: { repository, path: ".github/workflows/release.yml", ref: "refs/heads/main" },
        },
        resolvedDependencies: [{ uri: repository, digest: { gitCommit: commit } }],
      },
      runDetails: {
        builder: { id: `node/${process.version} ${process.platform}-${process.arch}` },
      },
    },
  };
}
