import ts from "typescript";
import { membersOf, type PublicProgram, placeOf } from "./public-program.js";

/** What is wrong with the `@default` tags of options, and what was looked at. */
export interface DefaultsReport {
  /** Sentences with the place, the member and what is wrong. */
  readonly findings: readonly string[];
  /** How many defaults of the code were compared with a tag. */
  readonly compared: number;
}

/**
 * Where the code takes an optional member of an exported `*Options` with a default (`{ member = value }`
 * or `options.member ?? value`) that is a number, a text or a boolean, the member has a `@default`
 * tag with that value. No comment of an optional member names its default in prose.
 */
export function findDefaults(
  base: string,
  { packages, program, checker, exportsOf }: PublicProgram,
): DefaultsReport {
  const findings: string[] = [];
  const tags = new Map<ts.Node, { readonly name: string; readonly text: string | undefined }>();
  const seen = new Set<ts.Symbol>();
  for (const each of packages.flatMap(exportsOf)) {
    if (seen.has(each)) continue;
    seen.add(each);
    for (const member of membersOf(each, checker)) {
      const [node] = member.declarations ?? [];
      if (node === undefined || !ts.isPropertySignature(node) || node.questionToken === undefined)
        continue;
      const name = `${each.name}.${member.name}`;
      const text = defaultTag(member, checker);
      const comment = ts.displayPartsToString(member.getDocumentationComment(checker));
      if (/\bDefault:? |\bby default\b/.test(comment))
        findings.push(`${placeOf(base, node)}  ${name}: write the default as @default`);
      tags.set(node, { name, text });
    }
  }
  let compared = 0;
  const compare = (property: ts.Symbol | undefined, value: ts.Expression) => {
    const real = constantOf(value, checker);
    for (const node of property?.declarations ?? []) {
      const tag = tags.get(node);
      if (tag === undefined || real === undefined) continue;
      compared += 1;
      if (tag.text === undefined) {
        // Without "Options" it is data, whose absence says something else.
        if (/^\w+Options\./.test(tag.name))
          findings.push(`${placeOf(base, node)}  ${tag.name} has no @default`);
      } else if (valueOfTag(tag.text) !== real)
        findings.push(
          `${placeOf(base, value)}  ${tag.name} has @default ${tag.text}, and here ${JSON.stringify(real)}`,
        );
    }
  };
  const visit = (node: ts.Node): void => {
    if (ts.isBindingElement(node) && node.initializer !== undefined) {
      const key = node.propertyName ?? node.name;
      const type = checker.getTypeAtLocation(node.parent);
      if (ts.isIdentifier(key)) compare(type.getProperty(key.text), node.initializer);
    } else if (
      ts.isBinaryExpression(node) &&
      node.operatorToken.kind === ts.SyntaxKind.QuestionQuestionToken &&
      ts.isPropertyAccessExpression(node.left)
    )
      compare(checker.getSymbolAtLocation(node.left.name), node.right);
    ts.forEachChild(node, visit);
  };
  for (const file of program.getSourceFiles())
    if (!file.isDeclarationFile && !file.fileName.includes("/node_modules/")) visit(file);
  return { findings: [...new Set(findings)].sort(), compared };
}

function defaultTag(member: ts.Symbol, checker: ts.TypeChecker): string | undefined {
  const tag = member.getJsDocTags(checker).find(({ name }) => name === "default");
  return tag === undefined ? undefined : ts.displayPartsToString(tag.text).trim();
}

type Value = number | string | boolean;

/** The value of an expression of literals and constants; undefined for anything else. */
function constantOf(node: ts.Expression, checker?: ts.TypeChecker): Value | undefined {
  if (ts.isNumericLiteral(node) || ts.isStringLiteral(node))
    return ts.isNumericLiteral(node) ? Number(node.text) : node.text;
  if (node.kind === ts.SyntaxKind.TrueKeyword) return true;
  if (node.kind === ts.SyntaxKind.FalseKeyword) return false;
  if (ts.isPropertyAccessExpression(node) && node.getText() === "Number.POSITIVE_INFINITY")
    return Infinity;
  if (ts.isIdentifier(node)) {
    if (node.text === "Infinity") return Infinity;
    const symbol = checker?.getSymbolAtLocation(node);
    const own =
      symbol !== undefined && symbol.flags & ts.SymbolFlags.Alias
        ? checker?.getAliasedSymbol(symbol)
        : symbol;
    const declared = own?.valueDeclaration;
    const isConstant =
      declared !== undefined &&
      ts.isVariableDeclaration(declared) &&
      (ts.getCombinedNodeFlags(declared) & ts.NodeFlags.Const) !== 0;
    return isConstant && declared.initializer !== undefined
      ? constantOf(declared.initializer, checker)
      : undefined;
  }
  if (!ts.isBinaryExpression(node)) return undefined;
  const [left, right] = [constantOf(node.left, checker), constantOf(node.right, checker)];
  if (typeof left !== "number" || typeof right !== "number") return undefined;
  const kind = node.operatorToken.kind;
  if (kind === ts.SyntaxKind.AsteriskToken) return left * right;
  return kind === ts.SyntaxKind.AsteriskAsteriskToken ? left ** right : undefined;
}

function valueOfTag(text: string): Value | undefined {
  const file = ts.createSourceFile("default.ts", `(${text})`, ts.ScriptTarget.Latest, true);
  const [statement] = file.statements;
  if (statement === undefined || !ts.isExpressionStatement(statement)) return undefined;
  const { expression } = statement;
  return constantOf(ts.isParenthesizedExpression(expression) ? expression.expression : expression);
}
