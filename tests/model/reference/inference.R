# Reference values of tests/model/test_against_r.py. Run in a folder with sleepstudy.csv, cbpp.csv (tests/r_tables.py) and
# radon.csv (covey.datasets.load_radon):  Rscript inference.R > inference.json
suppressMessages({library(lme4); library(lmerTest); library(emmeans); library(performance); library(clubSandwich); library(jsonlite)})
emm_options(lmer.df = "satterthwaite")
exact <- lmerControl(optimizer = "bobyqa", optCtrl = list(rhobeg = 0.2, rhoend = 1e-12, maxfun = 1e5), calc.derivs = FALSE)
close <- glmerControl(optimizer = "bobyqa", optCtrl = list(rhoend = 1e-10, maxfun = 1e5), tolPwrss = 1e-12)
sleep <- read.csv("sleepstudy.csv", stringsAsFactors = TRUE)
sleep$Subject <- factor(sleep$Subject)
herds <- read.csv("cbpp.csv", stringsAsFactors = TRUE)
herds$herd <- factor(herds$herd, levels = unique(herds$herd))
homes <- read.csv("radon.csv", stringsAsFactors = TRUE)
homes$place <- factor(ifelse(homes$floor == 0, "basement", "upper"))

variances <- function(model, group) apply(attr(ranef(model, condVar = TRUE)[[group]], "postVar"), 3, diag)
pick <- function(frame, names) lapply(names, function(name) unname(frame[[name]]))
means <- function(found) { s <- summary(found, infer = TRUE); list(estimate = s[[attr(s, "estName")]], se = s$SE, df = s$df,
  lower = s[[attr(s, "clNames")[1]]], upper = s[[attr(s, "clNames")[2]]], p = s$p.value) }
table <- function(...) { a <- suppressMessages(anova(...)); list(parameters = a$npar, aic = a$AIC, bic = a$BIC, loglik = a$logLik,
  statistic = a$Chisq[2], df = a$Df[2], p = a$`Pr(>Chisq)`[2]) }

slopes <- lmer(Reaction ~ Days * half + (Days | Subject), sleep, control = exact)
one <- lmer(Reaction ~ Days + (1 | Subject), sleep, control = exact)
two <- lmer(Reaction ~ Days + (Days | Subject), sleep, control = exact)
two_ml <- lme4::lmer(Reaction ~ Days + (Days | Subject), sleep, REML = FALSE, control = exact)
one_ml <- lme4::lmer(Reaction ~ Days + (1 | Subject), sleep, REML = FALSE, control = exact)
grid <- emmeans(slopes, ~ half)
out <- list(versions = sapply(c("lme4", "lmerTest", "emmeans", "performance", "clubSandwich", "insight"),
                              function(p) as.character(packageVersion(p))))
out$slopes <- list(
  coefficients = unname(fixef(slopes)), cov = unname(as.matrix(vcov(slopes))),
  residuals = unname(resid(slopes))[1:12], deviations = unname(as.matrix(ranef(slopes)$Subject)),
  variances = t(variances(slopes, "Subject")), means = means(grid), pairs = means(pairs(grid)),
  at = means(emmeans(slopes, ~ half | Days, at = list(Days = c(0, 9)))), tukey = {
    five <- sleep; five$z <- factor(five$z); m <- lmer(Reaction ~ z + Days + (1 | Subject), five, control = exact)
    list(pairs = means(pairs(emmeans(m, ~ z))), plain = means(pairs(emmeans(m, ~ z), adjust = "none")),
         means = means(emmeans(m, ~ z)), holm = means(pairs(emmeans(m, ~ z), adjust = "holm"))) },
  r2 = unlist(r2_nakagawa(two)), robust = lapply(c("CR0", "CR1", "CR1p", "CR1S", "CR3"), function(type)
    unname(as.matrix(vcovCR(lme4::lmer(Reaction ~ Days * half + (Days | Subject), sleep, control = exact), type = type)))))
out$comparison <- list(effects = table(one, two), common = table(two, slopes))
wald <- function(model) { p <- profile(model, delta = 0.02, maxpts = 2000, alphamax = 0.02, which = "theta_", devtol = 1e-12); unname(confint(p)) }
out$profile <- list(one = wald(one_ml), two = wald(two_ml))
nested <- lme4::lmer(log_radon ~ place + (1 | state/county), homes, control = exact)
out$nested <- list(
  states = levels(homes$state), cov = unname(as.matrix(vcov(nested))), r2 = unlist(r2_nakagawa(nested)),
  state = unname(ranef(nested)$state[[1]]), state_variance = unname(c(attr(ranef(nested, condVar = TRUE)$state, "postVar"))),
  county_names = rownames(ranef(nested)$`county:state`)[1:20],
  county = ranef(nested)$`county:state`[[1]][1:20], county_variance = c(attr(ranef(nested, condVar = TRUE)$`county:state`, "postVar"))[1:20],
  robust = lapply(c("CR0", "CR1", "CR3"), function(type) unname(as.matrix(vcovCR(nested, cluster = homes$state, type = type)))))
herd <- glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), herds, family = binomial, control = close)
flat <- glmer(cbind(incidence, size - incidence) ~ 1 + (1 | herd), herds, family = binomial, control = close)
out$herds <- list(
  coefficients = unname(fixef(herd)), cov = unname(as.matrix(vcov(herd))), herds = levels(herds$herd),
  deviations = unname(ranef(herd)$herd[[1]]), variances = unname(c(attr(ranef(herd, condVar = TRUE)$herd, "postVar"))),
  residuals = sapply(c("response", "pearson", "deviance", "working"), function(kind) unname(resid(herd, type = kind)), simplify = FALSE),
  means = means(emmeans(herd, ~ period)), response = means(emmeans(herd, ~ period, type = "response")),
  pairs = means(pairs(emmeans(herd, ~ period), adjust = "none")), r2 = unlist(r2_nakagawa(herd)),
  comparison = table(flat, herd), profile = { p <- profile(herd, which = "theta_", delta = 0.05); unname(confint(p)) })
cat(toJSON(out, digits = 12, auto_unbox = FALSE, pretty = FALSE))
