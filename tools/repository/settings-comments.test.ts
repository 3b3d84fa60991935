import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import ts from "typescript";
import { expect, test } from "vitest";
import { withSettingComments } from "../bundle/settings-comments.mjs";

const DECLARATIONS = `import { z } from "zod";
export declare const settingsSchema: z.ZodObject<{
    port: z.ZodDefault<z.ZodNumber>;
    pools: z.ZodDefault<z.ZodArray<z.ZodObject<{
        port: z.ZodString;
    }, z.core.$strict>>>;
    limits: z.ZodPrefault<z.ZodObject<{
        connections: z.ZodOptional<z.ZodNumber>;
    }, z.core.$strict>>;
}, z.core.$strict>;
export type Settings = z.input<typeof settingsSchema>;
`;
const SCHEMA = {
  properties: {
    port: { description: "port to listen on", default: 8000 },
    pools: { description: "where requests go", default: [] },
    limits: {
      description: "what clients can make the server hold",
      default: {},
      properties: { connections: { description: "clients' connections" } },
    },
  },
};

test("an editor shows the description and the default of a setting", () => {
  const { text } = withSettingComments(DECLARATIONS, "", SCHEMA);
  const use =
    "const given = {} as Settings;\ngiven.port; given.pools; given.limits?.connections;\n";
  // In the folder of a package that has zod.
  const folder = fileURLToPath(new URL("../../packages/fleet", import.meta.url));
  const files = new Map([
    [join(folder, "declared.d.ts"), text],
    [join(folder, "use.ts"), `import type { Settings } from "./declared.js";\n${use}`],
  ]);
  const options = { module: ts.ModuleKind.NodeNext, strict: true, skipLibCheck: true };
  const service = ts.createLanguageService({
    readFile: ts.sys.readFile,
    readDirectory: ts.sys.readDirectory,
    directoryExists: ts.sys.directoryExists,
    getDirectories: ts.sys.getDirectories,
    getCompilationSettings: () => options,
    getScriptFileNames: () => [...files.keys()],
    getScriptVersion: () => "1",
    getScriptSnapshot: (name) => {
      const content = files.get(name) ?? ts.sys.readFile(name);
      return content === undefined ? undefined : ts.ScriptSnapshot.fromString(content);
    },
    fileExists: (name) => files.has(name) || ts.sys.fileExists(name),
    getCurrentDirectory: () => folder,
    getDefaultLibFileName: (given) =>
      join(dirname(ts.sys.getExecutingFilePath()), ts.getDefaultLibFileName(given)),
  });
  const shown = (name: string) => {
    const file = join(folder, "use.ts");
    const info = service.getQuickInfoAtPosition(file, files.get(file)?.lastIndexOf(name) ?? 0);
    const tags =
      info?.tags?.map((tag) => `@${tag.name} ${ts.displayPartsToString(tag.text)}`) ?? [];
    return [ts.displayPartsToString(info?.documentation), ...tags].join(" ");
  };
  expect(["port", "pools", "limits", "connections"].map(shown)).toEqual([
    "port to listen on @default 8000",
    "where requests go @default []",
    "what clients can make the server hold",
    "clients' connections",
  ]);
});

test("what the source map says of a line moves with it", () => {
  const { text, mappings } = withSettingComments(
    "declare const s: {\n    a: 1;\n    b: 2;\n};",
    "A;B;C;D",
    {
      properties: { b: { description: "it */ ends", default: 2 } },
    },
  );
  expect(text.split("\n")).toEqual([
    "declare const s: {",
    "    a: 1;",
    "    /** it *\\/ ends @default 2 */",
    "    b: 2;",
    "};",
  ]);
  expect(mappings).toBe("A;B;;C;D");
});
