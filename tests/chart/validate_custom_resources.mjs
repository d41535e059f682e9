// Validates objects of operators by the schemas of their CRDs, which @kubernetes-models has as code.
// node validate_custom_resources.mjs NODE_MODULES < {"objects": [...], "packages": {group: [package, ...]}};
// prints a JSON list of problems.
import { existsSync, readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { objects, packages } = JSON.parse(readFileSync(0, "utf8"));
const problems = [];
for (const object of objects) {
  const [group, version] = object.apiVersion.split("/");
  for (const name of packages[group]) {
    const path = `${process.argv[2]}/@kubernetes-models/${name}/${group}/${version}/${object.kind}`;
    // ES modules: .mjs, or .js in packages of nothing else.
    const file = [".mjs", ".js"].map((suffix) => path + suffix).find(existsSync);
    const { [object.kind]: Model } = await import(pathToFileURL(file));
    try {
      new Model(object).validate();
    } catch (error) {
      problems.push(`${name}: ${object.kind} ${object.metadata.name}: ${error.message}`);
    }
  }
}
console.log(JSON.stringify(problems));
