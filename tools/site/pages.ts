import { execFileSync } from "node:child_process";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join, posix } from "node:path";
import { root } from "../repository/source-files.js";

export interface Page {
  /** Its file in the repository. */
  readonly source: string;
  /** Its path in the site. */
  readonly target: string;
  readonly text: string;
}

/** Path in the site of a Markdown file; undefined for one that is no page. */
function targetOf(source: string): string | undefined {
  const inDocs = /^docs\/(.+\.md)$/.exec(source)?.[1];
  if (inDocs !== undefined) return inDocs;
  const inPackages = /^(?:packages|apps)\/([\w-]+)\/README\.md$/.exec(source)?.[1];
  if (inPackages !== undefined) return `packages/${inPackages}.md`;
  if (source === "README.md") return "overview.md";
  return /^(CONTRIBUTING|SECURITY)\.md$/.test(source) ? source.toLowerCase() : undefined;
}

/** All pages, and other files of docs/ that they show. */
export function readPages(): {
  readonly pages: readonly Page[];
  readonly files: readonly string[];
} {
  const listed = execFileSync(
    "git",
    ["ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    {
      cwd: root,
      encoding: "utf8",
    },
  )
    .split("\0")
    .filter((path) => path !== "" && existsSync(join(root, path)));
  const pages = listed.flatMap((source) => {
    const target = targetOf(source);
    return target === undefined
      ? []
      : [{ source, target, text: readFileSync(join(root, source), "utf8") }];
  });
  const files = listed.filter((path) => path.startsWith("docs/") && !path.endsWith(".md"));
  return { pages, files };
}

/**
 * As the repository's web pages make it. It goes into the site's configuration as text: it uses
 * nothing else.
 */
export function slugOf(heading: string): string {
  return heading
    .trim()
    .toLowerCase()
    .replace(/[^\p{L}\p{N}\s_-]/gu, "")
    .replace(/\s/g, "-");
}

export function anchorsOf(text: string): ReadonlySet<string> {
  const found = new Map<string, number>();
  const anchors = new Set<string>();
  for (const [, heading = ""] of withoutFences(text).matchAll(/^#{1,6} +(.+)$/gm)) {
    const slug = slugOf(heading.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[`*]/g, ""));
    const times = found.get(slug) ?? 0;
    found.set(slug, times + 1);
    anchors.add(times === 0 ? slug : `${slug}-${times}`);
  }
  return anchors;
}

const withoutFences = (text: string) => text.replace(/^ *```[\s\S]*?^ *```/gm, "");

const LINK = /(\]\()(\.{0,2}\/?[^)\s:#]*)(#[^)\s]*)?\)/g;
/** A picture of docs/, in HTML. */
const PICTURE = /(\bsrc(?:set)?=")([^":\s]+)"/g;

/**
 * With links as they are in the site, or to the repository's web page. `dead` gets those that lead
 * nowhere.
 */
export function linked(
  page: Page,
  pages: readonly Page[],
  repository: string,
  dead: string[],
): string {
  const fences: string[] = [];
  const text = page.text.replace(
    /^ *```[\s\S]*?^ *```.*$/gm,
    (fence) => `\0${fences.push(fence) - 1}\0`,
  );
  const changed = text.replace(LINK, (whole, open: string, path: string, fragment = "") => {
    if (path === "" && fragment === "") return whole;
    const file =
      path === "" ? page.source : posix.normalize(posix.join(dirname(page.source), path));
    const other = pages.find(
      ({ source }) => source === file || source === posix.join(file, "README.md"),
    );
    if (other === undefined) {
      if (!existsSync(join(root, file))) dead.push(`${page.source}: ${path}`);
      const beside = posix.relative(dirname(page.source), file);
      if (file.startsWith("docs/"))
        return page.target.startsWith("overview")
          ? `${open}./${file.slice(5)})`
          : `${open}./${beside})`;
      return `${open}${repository}/blob/main/${file}${fragment})`;
    }
    if (fragment !== "" && !anchorsOf(other.text).has(decodeURIComponent(fragment.slice(1))))
      dead.push(`${page.source}: ${path}${fragment}`);
    const relative = posix.relative(posix.dirname(page.target), other.target);
    return `${open}${relative.startsWith(".") ? relative : `./${relative}`}${fragment})`;
  });
  const pictured = changed.replace(PICTURE, (_, attribute: string, path: string) => {
    const file = posix.join(dirname(page.source), path);
    if (!existsSync(join(root, file))) dead.push(`${page.source}: ${path}`);
    return `${attribute}./${posix.relative(posix.dirname(page.target), file.replace(/^docs\//, ""))}"`;
  });
  return pictured.replace(/\0(\d+)\0/g, (_, index: string) => fences[Number(index)] ?? "");
}

/** A page whose Mermaid diagrams are elements that the site's theme draws. */
export function withDiagrams(text: string): string {
  return text.replace(/^```mermaid\n([\s\S]*?)^```$/gm, (_, diagram: string) => {
    const escaped = diagram.replace(/[&<>]/g, (character) => `&#${character.charCodeAt(0)};`);
    return `<pre class="mermaid" v-pre>\n${escaped}</pre>`;
  });
}
